"""The effect of a method by the distance from the compression: means over pieces of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from kvjax.eval.report.cells import bootstrap_interval

# The length of the first piece; those after it end at powers of two.
FIRST = 16
# The averaged values of each piece, by their names in a row of results.
NAMES = ("nll", "full_nll", "kl", "top1")


def pieces(steps: int) -> list[tuple[int, int]]:
    """Return the first and last distance of every piece, in tokens after the compression.

    >>> pieces(100), pieces(12)
    ([(1, 16), (17, 32), (33, 64), (65, 100)], [(1, 12)])
    """
    ends, last = [], FIRST
    while last < steps:
        ends.append(last)
        last *= 2
    return list(zip([1, *(end + 1 for end in ends)], [*ends, steps], strict=True))


def by_distance(values: Mapping[str, Float[np.ndarray, "F"]]) -> list[dict[str, Any]]:
    """Average one window in every piece; values: of each predicted token, by name.

    >>> by_distance({"kl": np.repeat([1.0, 3.0], [16, 4])})
    [{'first': 1, 'last': 16, 'kl': 1.0}, {'first': 17, 'last': 20, 'kl': 3.0}]
    """
    steps = len(next(iter(values.values())))
    return [
        {"first": first, "last": last} | {n: float(x[first - 1 : last].mean()) for n, x in values.items()}
        for first, last in pieces(steps)
    ]


def summarise_distances(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per piece the means over windows of one method and budget, with 95% intervals (_low, _high).

    rows: of results, each with what `by_distance` returns as "distances". Empty where some have none: they
    are of an earlier version.

    >>> one = dict(first=1, last=16, nll=2.5, full_nll=2.0, kl=0.25, top1=1.0)
    >>> [found] = summarise_distances([{"distances": [one]}] * 4)
    >>> found["delta_nll"], found["kl"], found["kl_high"]
    (0.5, 0.25, 0.25)
    """
    if not all("distances" in row for row in rows):
        return []
    return [_piece(windows) for windows in zip(*(row["distances"] for row in rows), strict=True)]


def _piece(windows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One piece of all windows."""
    values = {name: [one[name] for one in windows] for name in NAMES}
    values["delta_nll"] = [a - b for a, b in zip(values["nll"], values["full_nll"], strict=True)]
    found = {"first": windows[0]["first"], "last": windows[0]["last"]}
    for name, of in values.items():
        found[name] = float(np.mean(of))
        if name in ("delta_nll", "kl", "top1"):
            found[f"{name}_low"], found[f"{name}_high"] = bootstrap_interval(of)
    return found


def flat(distances: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary of all pieces as columns, such as kl_17_32.

    >>> flat([dict(first=1, last=16, kl=0.25, kl_low=0.2, kl_high=0.3, delta_nll=0.0, top1=1.0)])
    {'kl_1_16': 0.25, 'kl_low_1_16': 0.2, 'kl_high_1_16': 0.3, 'delta_nll_1_16': 0.0, 'top1_1_16': 1.0}
    """
    return {
        f"{name}_{one['first']}_{one['last']}": value
        for one in distances
        for name, value in one.items()
        if name.startswith(("kl", "delta_nll", "top1"))
    }
