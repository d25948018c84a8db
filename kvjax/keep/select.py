"""Select: from scores and counts to the slots that stay. Of equal scores (in float32) the first stays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def ranks(scores: Float[Array, "*b S"]) -> Int[Array, "*b S"]:
    """Rank of every slot by descending score, 0 = best; equal scores rank by slot order."""
    order = jnp.argsort(-scores.astype(jnp.float32), axis=-1, stable=True)
    return jnp.argsort(order, axis=-1, stable=True).astype(jnp.int32)


def top(scores: Float[Array, "*b S"], counts: Int[Array, "*b"]) -> Bool[Array, "*b S"]:
    """Choose the `counts` best slots of every head; slots scored -inf are never among them."""
    return (ranks(scores) < counts[..., None]) & (scores > -jnp.inf)


def slot_lists(kept: Bool[Array, "*b S"], capacity: int) -> tuple[Int[Array, "*b C"], Bool[Array, "*b C"]]:
    """List indices of the kept slots in slot order, and which of the C entries are in use.

    Entries beyond a head's count point at slot 0 and are not in use.
    """
    s = kept.shape[-1]
    # Kept slots sort before dropped ones and stay in order; C may exceed S.
    key = jnp.where(kept, jax.lax.broadcasted_iota(jnp.int32, kept.shape, kept.ndim - 1), s)
    order = jnp.sort(key, axis=-1)[..., :capacity]
    if capacity > s:
        order = jnp.pad(order, [(0, 0)] * (order.ndim - 1) + [(0, capacity - s)], constant_values=s)
    used = order < s
    return jnp.where(used, order, 0).astype(jnp.int32), used
