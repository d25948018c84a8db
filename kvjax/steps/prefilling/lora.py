"""Marked tokens: some tokens of a prompt are projected with additional weights (LoRA)."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar.fitted import of_layer
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer, Projected


class Marks(NamedTuple):
    """Which tokens are marked, and the digest of the arrays of their additional weights.

    share: 1 for marked tokens and 0 for others; fractions while a fit needs gradients. sees: the last
    position that every token attends to, and rotated_at: the positions by which they are rotated, if not
    their own ones.
    """

    share: Float[Array, "B T"]
    digest: str
    sees: Int[Array, "B T"] | None = None
    rotated_at: Int[Array, "B T"] | None = None


def marked(layer: Layer, x: Projected, marks: Marks, params: Params) -> Projected:
    """Projections with x A B added to the queries, keys and values of marked tokens (LoRA, arXiv:2106.09685).

    A and B are the layer's "q_down" [D, R] and "q_up" [R, N H], and likewise of k and v.
    """
    arrays = of_layer(params, layer.number)[marks.digest]
    assert x.k is not None and x.v is not None
    q, k, v = (
        y
        + jnp.swapaxes(
            _added(arrays, name, x.hidden, marks).reshape(*x.hidden.shape[:2], y.shape[1], -1), 1, 2
        )
        for name, y in (("q", x.q), ("k", x.k), ("v", x.v))
    )
    return x._replace(q=q, k=k, v=v)


def standing(layer: Layer, marks: Marks) -> tuple[Int[Array, "B T"], Layer]:
    """Return positions by which tokens are rotated, and a layer with the last position that each sees."""
    rotated_at = layer.pos if marks.rotated_at is None else marks.rotated_at
    return rotated_at, layer if marks.sees is None else layer._replace(pos=marks.sees)


def marked_output(
    layer: Layer, out: Float[Array, "B N T V"], marks: Marks, params: Params
) -> Float[Array, "B N T V"]:
    """Add x A B to the heads' outputs x of marked tokens, before the output map W is applied.

    So the output map of marked tokens is W + A B W, a LoRA over the heads' outputs. A is "o_down" [N V, R],
    B "o_up" [R, N V].
    """
    arrays = of_layer(params, layer.number)[marks.digest]
    flat = jnp.swapaxes(out, 1, 2)
    added = _added(arrays, "o", flat.reshape(*flat.shape[:2], -1), marks)
    return out + jnp.swapaxes(added.reshape(flat.shape), 1, 2)


def _added(
    arrays: dict[str, Array], name: str, x: Float[Array, "B T X"], marks: Marks
) -> Float[Array, "B T Y"]:
    """Compute x A B for marked tokens, and zeros for others."""
    down, up = (arrays[f"{name}_{part}"].astype(jnp.float32) for part in ("down", "up"))
    return (marks.share[..., None] * (x.astype(jnp.float32) @ down @ up)).astype(x.dtype)
