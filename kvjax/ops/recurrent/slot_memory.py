"""Slot memory: what a chunk of tokens leaves in M slots, for slot attention and random features.

    A_im = enters_im A_0m + sum_{j <= i} holds_ijm x_j

A_im is the content of slot m when token i of the chunk reads it, A_0 the content before the chunk. Slots
decay by a gate (`gated`), or they are running averages with weights exp(s) (`averaged`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.ops.base.chunks import TokenChunk


class SlotWeights(NamedTuple):
    """holds: the weight of token j in each slot at token i. enters: the weight of the previous content."""

    holds: Float[Array, "B C C H M"]
    enters: Float[Array, "B C H M"]


class LogSum(NamedTuple):
    """sum_j exp(s_j) = total exp(top) with top = max_j s_j; an empty sum has total 0 and top -inf.

    Two numbers, because a single logarithm would round the weights: near 1000, float32 has steps of 6e-5.
    """

    top: Float[Array, "*n H M"]
    total: Float[Array, "*n H M"]


def empty_sum(like: Float[Array, "B T H M"]) -> LogSum:
    """Make an empty sum, for scores of this shape."""
    zero = jnp.zeros_like(like[:, 0])
    return LogSum(zero - jnp.inf, zero)


def gated(s: Float[Array, "B C H M"], g: Float[Array, "B C H M"], chunk: TokenChunk) -> SlotWeights:
    """Slots that decay by e^g at every token and then add s times the token."""
    seen, carried = _visible(chunk)
    after = seen & ~jnp.eye(g.shape[1], dtype=bool)[None, :, :, None, None]
    # Summed separately for every pair: a difference of running sums loses weak decays after strong ones.
    apart = jnp.cumsum(jnp.where(after, g[:, :, None], 0.0), axis=1)
    enters = jnp.exp(jnp.cumsum(jnp.where(carried, g, 0.0), axis=1))
    return SlotWeights(jnp.where(seen, jnp.exp(apart), 0.0) * s[:, None], jnp.where(carried, enters, 0.0))


def averaged(s: Float[Array, "B C H M"], chunk: TokenChunk, before: LogSum) -> tuple[SlotWeights, LogSum]:
    """Slots that average the tokens of a segment so far, weighted by exp(s); and the sums of the weights.

    The largest score so far is subtracted from every exponent and cancels: nothing can overflow, what a token
    reads does not depend on later ones, and the largest weight is 1. `before` is the sum before the chunk.
    """
    # Finite for empty sums: the difference of two infinities is NaN.
    low = jnp.asarray(jnp.finfo(s.dtype).min / 2, s.dtype)
    seen, carried = _visible(chunk)
    seen = seen & chunk.real[:, None, :, None, None]
    old = jnp.maximum(before.top, low)[:, None]
    top = jnp.maximum(jnp.where(seen, s[:, None], low).max(2), jnp.where(carried, old, low))
    # The largest score cancels in every result, so it needs no gradient.
    top = jax.lax.stop_gradient(top)
    holds = jnp.where(seen, jnp.exp(jnp.where(seen, s[:, None] - top[:, :, None], 0.0)), 0.0)
    enters = jnp.where(carried, jnp.exp(jnp.where(carried, old - top, 0.0)), 0.0) * before.total[:, None]
    total = holds.sum(2) + enters
    some = jnp.where(total > 0, total, 1.0)
    shares = SlotWeights(holds / some[:, :, None], enters / some)
    return shares, LogSum(jnp.where(total > 0, top, -jnp.inf), total)


def _visible(chunk: TokenChunk) -> tuple[Bool[Array, "B C C 1 1"], Bool[Array, "B C 1 1"]]:
    """(which tokens j token i may see, whether it continues the entering segment)."""
    size = chunk.number.shape[1]
    same = chunk.number[:, :, None] == chunk.number[:, None]
    seen = same & jnp.tril(jnp.ones((1, size, size), bool))
    return seen[..., None, None], (chunk.number == chunk.before[:, None])[..., None, None]


def read(
    p: Float[Array, "B C H M"], shares: SlotWeights, x: Float[Array, "B C H V"], kept: Float[Array, "B H M V"]
) -> Float[Array, "B C H V"]:
    """sum_m p_im A_im for slots with previous content `kept` that take tokens x."""
    weights = jnp.einsum("bihm,bijhm->bijh", p, shares.holds)
    old = jnp.einsum("bihm,bhmv->bihv", p * shares.enters, kept)
    return jnp.einsum("bijh,bjhv->bihv", weights, x) + old


def match(
    q: Float[Array, "B C H K"], shares: SlotWeights, x: Float[Array, "B C H K"], kept: Float[Array, "B H M K"]
) -> Float[Array, "B C H M"]:
    """q_i' A_im for slots with previous content `kept` that take tokens x."""
    new = jnp.einsum("bijh,bijhm->bihm", jnp.einsum("bihk,bjhk->bijh", q, x), shares.holds)
    return new + shares.enters * jnp.einsum("bihk,bhmk->bihm", q, kept)


def carry(
    shares: SlotWeights, x: Float[Array, "B C H V"], kept: Float[Array, "B H M V"]
) -> Float[Array, "B H M V"]:
    """Return A after the chunk."""
    new = jnp.einsum("bjhm,bjhv->bhmv", shares.holds[:, -1], x)
    return shares.enters[:, -1, :, :, None] * kept + new
