"""Weighted k-means on a line, solved exactly, on the host in float64."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

# Vectors whose distances to all centroids are computed at a time.
PIECE = 512


def best_levels(
    weight: Float[np.ndarray, "N"], total: Float[np.ndarray, "N"], square: Float[np.ndarray, "N"], count: int
) -> Float[np.ndarray, "C"]:
    """Find the `count` levels of least weighted squared error for numbers in N neighbouring bins.

    weight, total, square: for every bin the sums of w, w x and w x^2 over its numbers x of weights w. Numbers
    of one bin share a level; with one number per bin the levels are optimal. If fewer bins than levels have
    weight, the largest level is repeated; if none has any, levels are evenly spaced in [-1, 1].

    >>> x = np.array([0.0, 1.0, 10.0, 11.0])
    >>> best_levels(np.ones(4), x, x * x, 2).tolist()
    [0.5, 10.5]
    """
    # Bins whose weight is below the rounding error of the sum of weights count as empty: a level of such bins
    # alone would have a weight of 0.
    held = weight > np.finfo(np.float64).eps * weight.sum()
    sums = [np.concatenate([[0.0], np.cumsum(a[held], dtype=np.float64)]) for a in (weight, total, square)]
    n = int(held.sum())
    if n == 0:
        return np.linspace(-1, 1, count)

    def between(a: np.ndarray) -> Float[np.ndarray, "N1 N1"]:
        return a[None, :] - a[:, None]

    w, s, q = map(between, sums)
    later = np.arange(n + 1)[:, None] < np.arange(n + 1)[None, :]
    # The error of one level for the bins i to j - 1: sum w x^2 - (sum w x)^2 / sum w.
    cost = np.where(later, q - s * s / np.where(later, w, 1.0), np.inf)
    # least[j]: the least error of the first j bins with as many levels as iterations so far.
    least, starts = np.where(np.arange(n + 1) == 0, 0.0, np.inf), []
    for _ in range(min(count, n)):
        each = least[:, None] + cost
        starts.append(each.argmin(0))
        least = each.min(0)
    found, end = [], n
    for start in reversed(starts):
        found.append(s[start[end], end] / w[start[end], end])
        end = start[end]
    levels = np.array(found[::-1])
    return np.concatenate([levels, np.full(count - len(levels), levels[-1])])


def weighted_centroids(
    x: Float[np.ndarray, "N c"], weight: Float[np.ndarray, "N"], count: int, turns: int = 25, seed: int = 0
) -> Float[np.ndarray, "C c"]:
    """`count` vectors with small sum_i w_i ||x_i - c(x_i)||^2: `turns` iterations of Lloyd's algorithm.

    The initial vectors are x_i drawn by their weights, each at most once. A vector that is nearest to no x_i
    is unchanged; if there are fewer x_i of positive weight than vectors, some are drawn again. Which vector
    is nearest is found in float32, from the mean of all x_i, for `PIECE` of them at a time, whose distances
    stay in the core's own memory: that takes an eighth of the time.

    >>> weighted_centroids(np.array([[0.0], [1.0], [9.0]]), np.array([1.0, 3.0, 1.0]), 2)[:, 0].tolist()
    [0.75, 9.0]
    """
    rng, held = np.random.RandomState(seed), weight > 0
    x, weight = (x[held], weight[held]) if held.any() else (x, np.ones(len(x)))
    first = rng.choice(len(x), min(count, len(x)), replace=False, p=weight / weight.sum())
    mean = x.mean(0, dtype=np.float64)
    x = x - mean
    centres, ones = x[np.resize(first, count)], np.ones((len(x), 1))
    rows, weighted = np.hstack([x, ones]).astype(np.float32), weight * x.T
    for _ in range(turns):
        nearest = _nearest(rows, centres)
        mass = np.bincount(nearest, weight, count)
        sums = np.stack([np.bincount(nearest, column, count) for column in weighted], 1)
        centres = np.where(mass[:, None] > 0, sums / np.maximum(mass, 1e-300)[:, None], centres)
    return centres + mean


def _nearest(rows: Float[np.ndarray, "N c1"], centres: Float[np.ndarray, "C c"]) -> Int[np.ndarray, "N"]:
    """Find the nearest centroid of each vector x, by the largest <x, c> - |c|^2 / 2; rows holds [x, 1]."""
    columns = np.hstack([centres, -np.square(centres).sum(1, keepdims=True) / 2]).astype(np.float32).T
    return np.concatenate([(rows[i : i + PIECE] @ columns).argmax(1) for i in range(0, len(rows), PIECE)])
