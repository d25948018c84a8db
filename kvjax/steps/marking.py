"""Marked tokens: some tokens of a prompt are projected by more weights than the others."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.fitted import of_layer
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer, Projected
from kvjax.ops.attention.union import Keys


class Marks(NamedTuple):
    """Which tokens are marked, and the digest of the arrays that are theirs.

    share: 1 of marked tokens and 0 of others; between them while a fit looks for a slope. block: marked
    tokens see each other whatever their order.
    """

    share: Float[Array, "B T"]
    digest: str
    block: bool = False


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


def together(new: Keys, past: list[Keys], marks: Marks | None) -> tuple[Keys, list[Keys]]:
    """New keys and the others, where marked ones may be seen by all marked tokens of their row.

    They are then a set of their own, which stands where the first of them does.
    """
    if marks is None or not marks.block:
        return new, past
    assert new.pos is not None
    mine = (marks.share > 0)[:, None]
    first = jnp.where(mine, new.pos, jnp.iinfo(jnp.int32).max).min(-1, keepdims=True)
    block = new._replace(pos=jnp.where(mine, first, -1))
    return new._replace(pos=jnp.where(mine, -1, new.pos)), [*past, block]
