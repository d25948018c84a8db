"""Requests that follow earlier ones: how much of a prompt is the beginning of an earlier prompt.

A trace with keys of blocks says which earlier request each prompt continues. `fit_prefixes` records how
often, how much of it, and after how many requests. `with_prefixes` draws such requests; the share of their
blocks that a cache of any size holds is nearly the trace's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from kvjax.serve.requests import Request

# Ranges of prompt lengths with as many requests each, and quantiles.
RANGES, QUANTILES = 10, 51
AT = np.linspace(0, 1, QUANTILES)


def matches(requests: Sequence[Request]) -> tuple[Int[np.ndarray, "N"], Int[np.ndarray, "N"]]:
    """Leading blocks of each prompt that an earlier one had, and how many requests ago the last of them was.

    >>> texts = ("a", "b"), ("c", "d"), ("a", "e")
    >>> asked = [Request(i, 0.0, 8, 1, keys, 4) for i, keys in enumerate(texts)]
    >>> [x.tolist() for x in matches(asked)]
    [[0, 0, 1], [0, 0, 2]]
    """
    seen: dict[Hashable, int] = {}
    found = np.zeros((2, len(requests)), int)
    for i, one in enumerate(requests):
        count = next((n for n, key in enumerate(one.keys) if key not in seen), len(one.keys))
        found[:, i] = count, i - seen[one.keys[count - 1]] if count else 0
        seen |= dict.fromkeys(one.keys, i)
    return found[0], found[1]


def fit_prefixes(requests: Sequence[Request]) -> dict[str, Any]:
    """Statistics of common prefixes, for requests whose first block is nearly always the same.

    follows: for each range of prompt lengths, the share of requests that have more than the first block in
    common with an earlier one. part: of these requests, quantiles of the share of their other blocks that is
    in common with it. lag: quantiles of how many requests ago it came.
    """
    count, lag = matches(requests)
    blocks = np.array([len(one.keys) for one in requests])
    follows = count > 1
    part = (count - 1) / np.maximum(blocks - 1, 1)
    where = _ranges(np.argsort(np.argsort(blocks, kind="stable"), kind="stable") / len(requests))
    here = [where == one for one in range(RANGES)]
    return {
        "span": requests[0].span,
        "follows": [round(float(follows[one].mean()), 3) for one in here],
        "part": [np.quantile(part[follows & one], AT).round(3).tolist() for one in here],
        "lag": np.quantile(lag[follows], AT).round().astype(int).tolist(),
    }


def with_prefixes(
    requests: Sequence[Request], known: dict[str, Any], ranks: Float[np.ndarray, "N"], seed: int
) -> list[Request]:
    """Return requests with keys of blocks that repeat as `known` says (`fit_prefixes`).

    ranks: of their prompt lengths, in [0, 1]. A request follows one at most that is long enough and that no
    other follows: the newest one not newer than its lag.
    """
    rng, span = np.random.default_rng([seed, 1]), known["span"]
    blocks = np.array([-(-one.prompt // span) for one in requests])
    where = _ranges(ranks)
    follows = rng.random(len(requests)) < np.array(known["follows"])[where]
    lag = np.interp(rng.random(len(requests)), AT, known["lag"]).round().astype(int)
    draws = rng.random(len(requests))
    part = np.array([np.interp(u, AT, known["part"][one]) for u, one in zip(draws, where, strict=True)])
    wanted = 1 + (part * (blocks - 1)).round().astype(int)
    # How many blocks a request may still give to another.
    given, oldest, found = np.zeros(len(requests), int), max(known["lag"]), []
    for i, one in enumerate(requests):
        keys: tuple[Hashable, ...] = (("first", 0),)
        first = max(i - oldest, 0)
        fits = first + np.flatnonzero(given[first:i] >= wanted[i]) if follows[i] else np.zeros(0, int)
        if len(fits):
            before = fits[fits <= i - lag[i]]
            chosen = before[-1] if len(before) else fits[0]
            given[chosen], keys = 0, found[chosen].keys[: wanted[i]]
        keys = keys[: blocks[i]]
        own = tuple((one.id, n) for n in range(len(keys), blocks[i]))
        given[i] = blocks[i]
        found.append(dataclasses.replace(one, keys=keys + own, span=span))
    return found


def _ranges(ranks: Float[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    return np.minimum((ranks * RANGES).astype(int), RANGES - 1)
