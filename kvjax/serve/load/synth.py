"""Synthetic requests: lengths and arrivals like those of a trace, or groups with common prefixes.

`statistics.json` has the statistics of each trace: quantiles of both lengths, the correlation of their ranks,
the rate, the variation of the gaps, and common prefixes where blocks have keys. `fit` computes an entry.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtr

from kvjax.base.errors import InputError
from kvjax.serve.load.follow import fit_prefixes, with_prefixes
from kvjax.serve.requests import Call, Request

QUANTILES = 201
FILE = Path(__file__).with_name("statistics.json")
TREE = "tree"
OPTIONS = {
    "requests": 1000, "rate": 0.0, "cv": 0.0, "seed": 0,
    "calls": 0, "groups": 16, "prefix": 1024, "suffix": 128, "output": 64,
}  # fmt: skip


@cache
def statistics() -> dict[str, dict[str, Any]]:
    """Read the statistics of each trace, by name."""
    return json.loads(FILE.read_text())


def fit(requests: Sequence[Request]) -> dict[str, Any]:
    """Compute the statistics of requests, from which `drawn` makes others like them."""
    prompt, output = (np.array([getattr(one, name) for one in requests]) for name in ("prompt", "output"))
    at = np.linspace(0, 1, QUANTILES)
    gaps = np.diff([one.arrived for one in requests])
    ranks = np.argsort(np.argsort([prompt, output]))
    prefixes = {"prefixes": fit_prefixes(requests)} if requests[0].keys else {}
    return {
        "rate": round(1 / gaps.mean(), 4),
        "cv": round(gaps.std() / gaps.mean(), 3),
        "ranks": round(float(np.corrcoef(ranks[0], ranks[1])[0, 1]), 3),
        "prompt": np.quantile(prompt, at).round().astype(int).tolist(),
        "output": np.quantile(output, at).round().astype(int).tolist(),
        **prefixes,
    }


def drawn(known: dict[str, Any], *, requests: int, rate: float, cv: float, seed: int) -> list[Request]:
    """Draw requests with a trace's lengths, the same rank correlation (a Gaussian copula), and Gamma gaps.

    If the trace names blocks, prompts begin like earlier ones as often as there.

    rate: requests per second, and cv: the gaps' coefficient of variation (1: Poisson); 0 takes the trace's
    own.
    """
    rng = np.random.default_rng(seed)
    # The correlation of normal variables that gives the wanted rank correlation.
    joint = 2 * math.sin(math.pi * known["ranks"] / 6)
    normal = rng.multivariate_normal([0, 0], [[1, joint], [joint, 1]], requests)
    at = np.linspace(0, 1, QUANTILES)
    prompt, output = (
        np.interp(ndtr(column), at, known[name]).round().astype(int)
        for column, name in zip(normal.T, ("prompt", "output"), strict=True)
    )
    times = arrivals(rng, requests, rate or known["rate"], cv or known["cv"])
    rows = zip(times.tolist(), prompt.tolist(), output.tolist(), strict=True)
    found = [Request(id, *row) for id, row in enumerate(rows)]
    prefixes = known.get("prefixes")
    return found if prefixes is None else with_prefixes(found, prefixes, ndtr(normal[:, 0]), seed)


def tree(
    *, requests: int, rate: float, cv: float, seed: int, groups: int, prefix: int, suffix: int, output: int
) -> list[Request]:
    """Draw requests of `groups` prefixes of `prefix` tokens (Zipf: the second half as often as the first).

    Every request adds `suffix` tokens of its own, and generates a geometric number of tokens, `output` on
    average. Rate 0: all arrive at once.
    """
    rng = np.random.default_rng(seed)
    popular = 1 / np.arange(1, groups + 1)
    group = rng.choice(groups, requests, p=popular / popular.sum()).tolist()
    lengths = rng.geometric(1 / output, requests).tolist()
    times = arrivals(rng, requests, rate, cv or 1.0).tolist() if rate else [0.0] * requests
    return [
        Request(id, times[id], prefix + suffix, lengths[id], (("group", group[id]), ("own", id)), prefix)
        for id in range(requests)
    ]


def with_calls(requests: Sequence[Request], most: int, seed: int) -> list[Request]:
    """Make requests call other programs up to `most` times each, at random tokens of their outputs.

    A call takes as long as one of a tool or of a person (InferCept, arXiv:2402.01869, table 1): 0.1 to 1 s,
    or 10 to 30 s, in equal parts.
    """
    rng, found = np.random.default_rng([seed, most]), []
    for one in requests:
        count = min(int(rng.integers(0, most + 1)), one.output - 1)
        after = 1 + np.sort(rng.permutation(one.output - 1)[:count])
        seconds = np.where(rng.random(count) < 0.5, rng.uniform(0.1, 1, count), rng.uniform(10, 30, count))
        calls = tuple(map(Call, after.tolist(), seconds.tolist()))
        found.append(dataclasses.replace(one, calls=calls))
    return found


def arrivals(rng: np.random.Generator, count: int, rate: float, cv: float) -> np.ndarray:
    """Draw times whose gaps are Gamma(1 / cv^2) with mean 1 / rate; the first is 0."""
    gaps = rng.gamma(1 / cv**2, cv**2 / rate, count)
    return np.cumsum(gaps) - gaps[0]


def synthetic(text: str) -> list[Request]:
    """Draw the requests of a text: a name of `statistics`, or "tree", and options.

    Raises InputError for unknown names and options, with the nearest one, and for numbers out of range.

    >>> len(synthetic("azure-conv:requests=20,rate=2,seed=1"))
    20
    """
    name, _, given = text.partition(":")
    if name not in (known := [*statistics(), TREE]):
        near = difflib.get_close_matches(name, known, 1)
        raise InputError(
            f"unknown workload {name!r}: did you mean {near[0] if near else ' or '.join(known)}?"
        )
    options = dict(OPTIONS)
    for pair in filter(None, given.split(",")):
        key, _, value = pair.partition("=")
        if key not in options:
            near = difflib.get_close_matches(key, options, 1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(options)}"
            raise InputError(f"workload {name} has no option {key!r}: {hint}")
        options[key] = _number(name, key, value)
    calls = options.pop("calls")
    if name == TREE:
        found = tree(**options)
    else:
        known = {key: options[key] for key in ("requests", "rate", "cv", "seed")}
        found = drawn(statistics()[name], **known)
    return with_calls(found, calls, options["seed"]) if calls else found


def _number(name: str, key: str, text: str) -> Any:
    kind = float if key in ("rate", "cv") else int
    try:
        value = kind(text)
    except ValueError:
        value = -1
    if not (0 <= value < math.inf) or (value == 0 and key != "seed"):
        what = "a number above 0" if kind is float else "a whole number from 1 up"
        raise InputError(f"workload {name} was given {key}={text!r}, expected {what}")
    return value
