"""Decode steps that read whole blocks by weighted means of keys, in float64 numpy (`tests.float64.reads`)."""

import numpy as np

from tests.float64.reference import softmax


def weighted_mean(k, direction, place):
    """sum_i softmax(<k_i, direction> + place_i)_i k_i."""
    logits = np.array([np.dot(key, direction) for key in k]) + place
    w = np.exp(logits - logits.max())
    return sum(a * key for a, key in zip(w / w.sum(), k, strict=True))


def of_list(arrays, name, at, size):
    """Return a fitted array of a list, in float64; zeros without a fit."""
    return np.zeros(size) if arrays is None else arrays[name][at.layer, at.number].astype(np.float64)


def attention_to(q, k, v, chosen):
    chosen = np.concatenate(chosen).astype(int)
    return softmax(q @ k[chosen].T / np.sqrt(k.shape[-1])) @ v[chosen]


def moba(count, *, page, arrays=None):
    """MoBA (arXiv:2502.13189): of the full pages, those whose mean keys match a group's queries best.

    count: of slots in full pages, how many are read. arrays: weights of the means.
    """

    def attends(q, k, v, pos, at):
        order = np.argsort(pos)
        full = (pos < at.stored).sum() // page
        pages = [order[p * page : (p + 1) * page] for p in range(full)]
        direction = of_list(arrays, "direction", at, k.shape[-1])
        gate = np.array([sum(head @ weighted_mean(k[p], direction, 0.0) for head in q) for p in pages])
        read = np.argsort(-gate, kind="stable")[: -(-count(full * page) // page)]
        return attention_to(q, k, v, [*(pages[p] for p in read), order[full * page :]])

    return attends


def nsa(count, *, page, newest, sinks, compress, stride, arrays=None, seen=None):
    """NSA (arXiv:2502.11089, eq. 7-10): blocks by a group's attention to the compressed keys in them.

    seen: a list that is told how many blocks each step reads, and of how many.
    """

    def attends(q, k, v, pos, at):
        order = np.argsort(pos)
        full = max((pos < at.stored).sum() - newest, 0) // page
        pages = [order[p * page : (p + 1) * page] for p in range(full)]
        direction = of_list(arrays, "direction", at, k.shape[-1])
        place = of_list(arrays, "place", at, compress)
        parts = [
            (p, weighted_mean(k[page_[i : i + compress]], direction, place))
            for p, page_ in enumerate(pages)
            for i in range(0, page - compress + 1, stride)
        ]
        share = np.zeros(full)
        for head in q if full else ():
            p_of_part = softmax(np.array([c @ head for _, c in parts]) / np.sqrt(k.shape[-1]))
            for (p, _), x in zip(parts, p_of_part, strict=True):
                share[p] += x
        of_sinks = -(-sinks // page)
        share[:of_sinks] = np.inf
        read = np.argsort(-share, kind="stable")[: of_sinks - (-count(full * page) // page)] if full else []
        if seen is not None:
            seen.append((len(read), full))
        return attention_to(q, k, v, [*(pages[p] for p in read), order[full * page :]])

    return attends
