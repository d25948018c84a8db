"""Attention with own keys for the nearest and first tokens, and another layer's keys for the rest (PoD)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.ops.attention import token_cache as cache
from kvjax.ops.attention.token_cache import QUERIES, Mask, Places, Segments, TokenCache
from kvjax.ops.base.dtypes import wide


class Proximal(NamedTuple):
    """The values of every token, and keys of the first and, in a ring buffer after them, the newest ones."""

    k: Float[Array, "B R H K"]
    v: Float[Array, "B S H V"]
    count: Int[Array, "B"]


def proximal_attention(
    q: Float[Array, "B T N K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    shared: Float[Array, "B S H K"],
    *,
    sinks: int,
    recent: int,
    initial_state: Proximal | None = None,
    segments: Segments = None,
    mask: Mask = None,
    scale: float | None = None,
) -> tuple[Float[Array, "B T N V"], Proximal]:
    """softmax(scale q_t'k_s where s < sinks or t - s < recent, else scale q_t'shared_s) over s <= t, times v.

    PoD (Ma et al., 2024, arXiv:2412.02252), equations of section 2.2: its gate, the share of the near tokens'
    exponentials in the sum of all, merges two attentions into one softmax, which is computed here directly.
    `shared` are the keys of the lowest layer of a block, for every slot, new tokens included. scale is K^-0.5
    unless given. With `initial_state` there are as many slots as it has; a token beyond them is not kept and
    its output is NaN. Tokens that mask leaves out are not kept. Where `segments` changes, s counts from 0
    again; the returned state continues rows of one segment alone.

    >>> x, v = jnp.ones((1, 3, 1, 1)), jnp.arange(3.0).reshape(1, 3, 1, 1)
    >>> o, state = proximal_attention(x, x, v, 0 * x, sinks=0, recent=1)
    >>> round(float(o[0, 1, 0, 0]), 4), state.k.shape  # e^1 on itself, e^0 on the token before
    (0.7311, (1, 1, 1, 1))
    """
    dtype = wide(v)
    q, k, v, shared = (x.astype(dtype) for x in (q, k, v, shared))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    size, before, capacity = sinks + recent, None, None
    if initial_state is None:
        ring, count = jnp.zeros((k.shape[0], size, *k.shape[2:]), dtype), jnp.zeros(k.shape[:1], jnp.int32)
    else:
        ring, count = initial_state.k.astype(dtype), initial_state.count
        before = TokenCache({"v": initial_state.v.astype(dtype)}, jnp.zeros_like(count), count)
        capacity = before.capacity
    slots, at = cache.append({"v": v}, before, segments, mask, capacity)
    near_keys = jnp.concatenate([ring, k], 1)
    number = jnp.concatenate([_numbers(count, sinks, recent), jnp.where(at.real, at.slot, slots.capacity)], 1)

    def body(q: Array, at: Places) -> Array:
        near = _spread(cache.products(q, near_keys), number, slots.capacity)
        index = jnp.arange(slots.capacity, dtype=jnp.int32)[None, None]
        close = (index - at.first[..., None] < sinks) | (at.slot[..., None] - index < recent)
        scores = jnp.where(close[:, None], near, cache.products(q, shared)) * factor
        p, _ = cache.softmax(scores, cache.seen(at, cache.stored(slots)))
        return cache.mix(p, slots.kept["v"])

    out = cache.over_queries(body, q, at, QUERIES)
    out = cache.checked(out, at.slot[..., None], slots.capacity)
    place = _places(jnp.where(at.real, at.slot, -1), slots.count, sinks, recent)
    rows = jnp.arange(k.shape[0])[:, None]
    return out, Proximal(ring.at[rows, place].set(k, mode="drop"), slots.kept["v"], slots.count)


def _numbers(count: Int[Array, "B"], sinks: int, recent: int) -> Int[Array, "B R"]:
    """Find the token each slot of the ring buffer holds after `count` tokens; a number beyond all if none."""
    slot = jnp.arange(sinks + recent, dtype=jnp.int32)[None]
    turns = (count[:, None] - 1 - slot) // recent
    number = jnp.where(slot < sinks, slot, slot + recent * turns)
    held = (number >= 0) & (number < count[:, None]) & (slot < count[:, None])
    return jnp.where(held, number, cache.NOWHERE)


def _places(number: Int[Array, "B T"], count: Int[Array, "B"], sinks: int, recent: int) -> Int[Array, "B T"]:
    """Find each token's slot in the ring buffer; one beyond all for tokens that leave it at once (and -1)."""
    inside = (number >= 0) & ((number < sinks) | (number >= count[:, None] - recent))
    slot = jnp.where(number < sinks, number, sinks + (number - sinks) % recent)
    return jnp.where(inside, slot, sinks + recent)


def _spread(scores: Float[Array, "B N T E"], number: Int[Array, "B E"], size: int) -> Float[Array, "B N T S"]:
    """Logits of entries in token order, 0 where there is no entry."""
    empty = jnp.zeros((*scores.shape[1:3], size), scores.dtype)
    return jax.vmap(lambda s, n: empty.at[..., n].set(s, mode="drop"))(scores, number)
