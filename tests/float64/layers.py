"""Budgets of layers in float64: per layer, boolean [lists, T] of the tokens of a prompt that stay."""

from __future__ import annotations

import numpy as np

from tests.float64.reference import best, window_score


def shared_out(prefer, total, most):
    """Proportional shares, rounded down; the remaining slots are given out one by one."""
    if total == 0:
        return np.zeros(len(prefer), int)
    counts = np.minimum(np.floor(prefer * total / prefer.sum()), most).astype(int)
    while counts.sum() < total and (counts < most).any():
        for i in np.flatnonzero(counts < most)[: total - counts.sum()]:
            counts[i] += 1
    return counts


def chosen(scores, counts):
    return [best(s, np.full(len(s), n)) for s, n in zip(scores, counts, strict=True)]


def zigzagkv(count, *, window, kernel, mass, least):
    def kept(prompt):
        needs = []
        for p in prompt.p:
            given = np.sort(p[:, -window:, :-window].sum(1), -1)[:, ::-1]
            held = np.cumsum(given, -1) / given.sum(-1, keepdims=True)
            needs.append(np.mean([np.argmax(h >= mass) + 1 for h in held]))
        spare = count(prompt.length) - window
        base = int(spare * least)
        total, most = len(needs) * (spare - base), prompt.length - window - base
        counts = window + base + shared_out(np.array(needs), total, most)
        return chosen([window_score(prompt, i, window, kernel) for i in range(len(needs))], counts)

    return kept


def dynamickv(count, *, window, kernel, most):
    def kept(prompt):
        scores = [window_score(prompt, i, window, kernel, kind="mean") for i in range(len(prompt.p))]
        spare = count(prompt.length) - window
        free = np.stack(scores)[:, :, :-window]
        layer = np.indices(free.shape)[0].ravel()
        order = np.argsort(-free.ravel(), kind="stable")[: spare * len(scores) * len(scores[0])]
        hits = np.bincount(layer[order], minlength=len(scores))
        limit = min(int(most * spare), prompt.length - window)
        return chosen(scores, window + shared_out(hits, len(scores) * spare, limit))

    return kept


def prefixkv(count, *, sinks, newest):
    """PrefixKV: layers add tokens in the order of the cumulative share of attention before them."""

    def kept(prompt):
        at = np.arange(prompt.length)
        stays = (at < sinks) | (at >= prompt.length - newest)
        scores = [p.sum(1).mean(0) for p in prompt.p]
        before = []
        for score in scores:
            rest = np.sort(score[~stays])[::-1]
            before.append((np.cumsum(rest) - rest) / rest.sum())
        total = len(scores) * (count(prompt.length) - stays.sum())
        # A layer's next token is among the prefix of share p if what goes before it is less than p.
        order = np.argsort(np.concatenate(before), kind="stable")[:total]
        counts = np.bincount(order // len(before[0]), minlength=len(scores))
        found = [
            best(np.where(stays, np.inf, s), n) for s, n in zip(scores, stays.sum() + counts, strict=True)
        ]
        return [np.broadcast_to(f, (len(k), prompt.length)) for f, k in zip(found, prompt.k, strict=True)]

    return kept
