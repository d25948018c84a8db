"""Codebooks of vectors for a head's channels, weighted by the likelihood's sensitivity to errors (CQ)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kvjax.base.errors import InputError
from kvjax.fitting.statistics.levels import felt, only_slots, padded_rows, words_of
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.models.model import Model
from kvjax.store.coupled import CoupledCodes
from kvjax.store.kmeans import weighted_centroids


def fit_vectors(
    model: Model,
    batches: list[list[list[int]]],
    *,
    method: Method,
    bits: int | None = None,
    channels: int | None = None,
    seed: int = 0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit 2^bits vectors for every `channels` neighbouring channels of a head (arXiv:2405.03917).

    k-means over the texts' keys before rotation, and values, in which the weight of a vector is the sum of
    squares of the gradient of the texts' negative log-likelihood with respect to it (the Fisher information's
    diagonal). bits, channels: those of the method unless they are given. Raises InputError for a model whose
    layers are not all plain attention with slots of their own, for bits that are not 1 to 8, for channels
    that do not divide a head, and for texts with fewer tokens than a codebook has vectors.
    """
    only_slots(model, "codebooks")
    own = [word for word in words_of(method) if isinstance(word, CoupledCodes)]
    bits = own[0].bits if bits is None else bits
    channels = own[0].channels if channels is None else channels
    if bits not in range(1, 9):
        raise InputError(f"bits is {bits}, expected 1 to 8")
    if model.config.head_dim % channels:
        raise InputError(f"channels is {channels}, expected a divisor of {model.config.head_dim}")
    count = sum(len(row) for rows in batches for row in rows)
    if count < 2**bits:
        raise InputError(
            f"the texts have {count} tokens, expected at least one for each of {2**bits} vectors: give more"
        )
    held: dict[str, list[np.ndarray]] = {"key": [], "value": []}
    weights: dict[str, list[np.ndarray]] = {"key": [], "value": []}
    for rows in progress(batches):
        given, counts = padded_rows(model, rows, 0)
        numbers, gradient = felt(model.config, model.params, *given)
        for of, x, g in zip(held, numbers, gradient, strict=True):
            # [L, K, tokens, G, c]
            split = [np.moveaxis(np.asarray(y), 1, 2)[:, :, counts] for y in (x, g)]
            x, g = (y.reshape(*y.shape[:3], -1, channels) for y in split)
            held[of].append(x)
            weights[of].append(np.square(g.astype(np.float64)).sum(-1))
    found = {}
    for of in held:
        x, w = np.concatenate(held[of], 2), np.concatenate(weights[of], 2)
        layers, heads, _, groups, _ = x.shape
        books = np.empty((layers, heads, groups, 2**bits, channels), np.float32)
        for at in np.ndindex(layers, heads, groups):
            i, k, g = at
            books[at] = weighted_centroids(x[i, k, :, g], w[i, k, :, g], 2**bits, seed=seed)
        found[f"{of} centroids"] = books
    return Fitted(found, "CoupledCodes", model.signature)
