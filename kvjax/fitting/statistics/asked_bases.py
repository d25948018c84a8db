"""Bases from attention's sensitivity to errors: by the queries of keys, by the weights of values (OSCAR)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from kvjax.fitting.statistics.basis_rules import BasisInputs, Numbers
from kvjax.store.rotate import hadamard


def by_attention(x: Numbers, meant: BasisInputs) -> dict[str, np.ndarray]:
    """OSCAR: M^-1 = U H P, of the eigenvectors U of a layer's covariance, a Hadamard matrix and an order.

    For keys that is the mean over KV heads of C_h = E[q q']; for values the mean over KV heads of E[w v v'],
    with w = k' C_h k over its mean. P puts channels in the order of bit-reversed ranks of the eigenvalues, so
    that every group of channels has some of all sizes.
    """
    queries = meant.queries
    assert queries is not None
    layers, heads, _, width = x.shape
    if meant.of == "key":
        covariance = queries.mean(1)
    else:
        k, v = meant.keys.astype(np.float64), x.astype(np.float64)
        weight = np.einsum("lkth,lkhi,lkti->lkt", k, queries, k)
        weight = weight / np.maximum(weight.mean(-1, keepdims=True), 1e-12)
        covariance = np.einsum("lkt,lkth,lkti->lhi", weight, v, v) / (v.shape[2] * heads)
    squares, vectors = np.linalg.eigh(covariance)
    # The matrix without random signs: its first row is positive.
    mixed = hadamard(width, 0) * np.sign(hadamard(width, 0)[0])
    turn = np.stack([u @ mixed[:, spread(s)] for s, u in zip(squares, vectors, strict=True)])
    each = np.repeat(turn[:, None], heads, 1)
    return {"matrix": np.swapaxes(each, -1, -2), "inverse": each}


def spread(squares: Float[np.ndarray, "H"]) -> np.ndarray:
    """Distribute channels over groups: the one of rank i, in falling order, is at bit-reversed i.

    >>> spread(np.array([3.0, 2.0, 1.0, 0.0])).tolist()
    [0, 2, 1, 3]
    """
    width = len(squares)
    digits = max(width - 1, 1).bit_length()
    backwards = [int(f"{i:0{digits}b}"[::-1], 2) for i in range(2**digits)]
    order = np.empty(width, int)
    order[[i for i in backwards if i < width]] = np.argsort(-squares, kind="stable")
    return order
