"""Marked tokens: some tokens of a prompt are projected by more weights than the others."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.fitted import of_layer
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer, Projected


class Marks(NamedTuple):
    """Which tokens are marked, and the digest of the arrays that are theirs.

    share: 1 of marked tokens and 0 of others; between them while a fit looks for a slope.
    """

    share: Float[Array, "B T"]
    digest: str


def marked(layer: Layer, x: Projected, marks: Marks | None, params: Params) -> Projected:
    """Projections with x A B added to the queries, keys and values of marked tokens (LoRA, arXiv:2106.09685).

    A and B are the layer's "q_down" [D, R] and "q_up" [R, N H], and likewise of k and v.
    """
    if marks is None:
        return x
    arrays = of_layer(params, layer.number)[marks.digest]
    share = marks.share[:, None, :, None]

    def more(name: str, y: Float[Array, "B X T H"]) -> Float[Array, "B X T H"]:
        down, up = (arrays[f"{name}_{part}"].astype(jnp.float32) for part in ("down", "up"))
        added = (x.hidden.astype(jnp.float32) @ down @ up).reshape(*x.hidden.shape[:2], y.shape[1], -1)
        return y + (share * jnp.swapaxes(added, 1, 2)).astype(y.dtype)

    assert x.k is not None and x.v is not None
    return x._replace(q=more("q", x.q), k=more("k", x.k), v=more("v", x.v))
