"""Shared keys of several rows: [B, ...] for R rows, where row r reads those of r // (R / B)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.ops.attention.union import Keys


def side_by_side(x: Float[Array, "R N T H"], lists: int) -> Float[Array, "{lists} N M H"]:
    """Reshape queries of rows that share keys as M = R / B * T tokens of one row.

    >>> side_by_side(jnp.ones((6, 4, 1, 8)), 2).shape
    (2, 4, 3, 8)
    """
    rows, heads, tokens, width = x.shape
    if rows == lists:
        return x
    beside = x.reshape(lists, rows // lists, heads, tokens, width).swapaxes(1, 2)
    return beside.reshape(lists, heads, -1, width)


def row_by_row(x: Float[Array, "B N M *_"], rows: int) -> Float[Array, "{rows} N T *_"]:
    """Invert `side_by_side`: row by row again."""
    lists, heads, tokens, *width = x.shape
    if rows == lists:
        return x
    own = x.reshape(lists, heads, rows // lists, -1, *width).swapaxes(1, 2)
    return own.reshape(rows, heads, -1, *width)


def for_rows(keys: Keys, rows: int) -> Keys:
    """Keys [B, ...] repeated for every row, [R, ...]."""
    copies = rows // keys.k.shape[0]
    return keys if copies == 1 else jax.tree.map(lambda x: jnp.repeat(x, copies, axis=0), keys)
