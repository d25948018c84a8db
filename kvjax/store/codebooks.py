"""Optimal codebooks of known distributions, computed on the host in float64."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class Codebook(NamedTuple):
    """A scalar quantiser: a number between two bounds becomes the centroid there."""

    centroids: Float[np.ndarray, "C"]
    bounds: Float[np.ndarray, "C-1"]


@lru_cache(maxsize=64)
def sphere_codebook(width: int, bits: int) -> Codebook:
    """Compute the optimal quantiser for one coordinate of a random unit vector of `width` coordinates.

    Such a coordinate has the density C (1 - t^2)^((width - 3) / 2) on [-1, 1], near N(0, 1 / width). The
    optimum (Lloyd, 1982; Max, 1960) has its bounds halfway between centroids and every centroid at the mean
    of the density between its bounds; both hold here to float64 precision.

    >>> sphere_codebook(128, 1).centroids.round(4).tolist()
    [-0.0707, 0.0707]
    """
    if width < 2:
        raise ValueError(f"a row of {width} channel has no direction to encode, expected at least 2 channels")
    # It takes a fifth of a second to import, and most methods have no codebook.
    from scipy.special import betainc, betaincinv, gammaln

    half = (width - 1) / 2
    top = np.exp(gammaln(width / 2) - gammaln(half)) / np.sqrt(np.pi) / (width - 1)
    count = 2**bits
    # Centroids at equal probabilities to begin with; the distribution is symmetric, and so they stay.
    centroids = 2 * betaincinv(half, half, (np.arange(count) + 0.5) / count) - 1
    for _ in range(100_000):
        bounds = (centroids[1:] + centroids[:-1]) / 2
        edges = np.concatenate([[-1.0], bounds, [1.0]])
        mass = np.diff(betainc(half, half, (1 + edges) / 2))
        # The integral of t times the density is -top (1 - t^2)^half.
        new = -top * np.diff((1 - edges**2) ** half) / mass
        new = (new - new[::-1]) / 2
        done = np.abs(new - centroids).max() < 1e-15
        centroids = new
        if done:
            break
    return Codebook(centroids, (centroids[1:] + centroids[:-1]) / 2)
