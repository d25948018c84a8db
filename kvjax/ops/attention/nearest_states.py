"""Retrieval of compressed states: which states are nearest to a token's own, and attention to those."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.ops.attention import token_cache as cache
from kvjax.ops.attention.token_cache import Mask, Places, Segments, TokenCache
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.softmax import softmax

# How many queries run at a time: each has the states that it retrieved in memory.
QUERIES = 64


def nearest_states(
    states: Float[Array, "B T C"],
    *,
    window: int,
    top: int,
    neighbours: int = 2,
    context: int = 2,
    initial_state: TokenCache | None = None,
    capacity: int | None = None,
    segments: Segments = None,
    mask: Mask = None,
) -> tuple[Int[Array, "B T M"], TokenCache]:
    """Find (the slots that every token retrieves, all states): the `top` nearest in L2, with neighbours.

    Neurocache (Safaya and Yuret, 2024, arXiv:2407.02486), section 3. A token at slot t searches among s <= t
    - window, and takes for each s that it finds `neighbours` consecutive slots from s - (neighbours - 1) // 2
    on, cut off at the ends of the visible range. It also takes what the `context` - 1 tokens before it
    retrieve, so M = context * top * neighbours; slots may occur twice, and -1 means none. Tokens see only
    their own segment of `segments`; the returned state continues rows of one segment.

    >>> x = jnp.asarray([[[0.0], [5.0], [1.0], [4.0]]])
    >>> nearest_states(x, window=1, top=1, neighbours=1, context=1)[0][0, :, 0].tolist()
    [-1, 0, 0, 1]
    """
    slots, at = cache.append({"states": states}, initial_state, segments, mask, capacity)
    kept = slots.kept["states"].astype(wide(states))
    square = jnp.square(kept).sum(-1)[:, None]
    offsets = jnp.arange(neighbours, dtype=jnp.int32) - (neighbours - 1) // 2
    number = jnp.arange(slots.capacity, dtype=jnp.int32)[None, None]

    def found_by(slot: Int[Array, "B T"], first: Int[Array, "B T"]) -> Int[Array, "B T Z"]:
        own = jnp.take_along_axis(kept, jnp.clip(slot, 0, slots.capacity - 1)[..., None], axis=1)
        last = slot - window
        seen = (number >= first[..., None]) & (number <= last[..., None])
        near = jnp.where(seen, 2 * jnp.einsum("btc,bsc->bts", own, kept) - square, -jnp.inf)
        score, index = jax.lax.top_k(near, min(top, slots.capacity))
        around = jnp.clip(
            index[..., None] + offsets[None, None, None], first[..., None, None], last[..., None, None]
        )
        around = jnp.where(jnp.isneginf(score)[..., None], -1, around)
        return around.reshape(*slot.shape, -1)

    def body(_: tuple[()], at: Places) -> Int[Array, "B T M"]:
        # An earlier segment's retrievals are dropped: its last slot is below the first visible one.
        return jnp.concatenate([found_by(at.slot - back, at.first) for back in range(context)], -1)

    return cache.over_queries(body, (), at, cache.QUERIES), slots


def attend_to_states(
    q: Float[Array, "B T N H"],
    states: Float[Array, "B S C"],
    index: Int[Array, "B T M"],
    k: Float[Array, "C K H"],
    v: Float[Array, "C K V"],
    *,
    scale: float,
) -> Float[Array, "B T N V"]:
    """softmax(scale q_t' k' s) over a token's states s at `index`, times v' s; 0 if there are none.

    Queries are multiplied with k first, so that no state is expanded.
    """
    dtype = wide(q)
    states, k, v = (x.astype(dtype) for x in (states, k, v))

    def body(_: tuple[()], given: tuple[Array, Array]) -> tuple[tuple[()], Array]:
        q, index = given
        b, t, n, _h = q.shape
        near = jax.vmap(lambda x, i: x[i])(states, jnp.maximum(index, 0))
        asks = jnp.einsum("btkgh,ckh->btkgc", q.astype(dtype).reshape(b, t, k.shape[1], -1, q.shape[-1]), k)
        scores = jnp.einsum("btkgc,btmc->btkgm", asks, near) * scale
        p, _lse = softmax(scores, (index >= 0)[:, :, None, None])
        out = jnp.einsum("btkgc,ckv->btkgv", jnp.einsum("btkgm,btmc->btkgc", p, near), v)
        return (), out.reshape(b, t, n, -1)

    return cache.by_chunks(body, (), (q, index), QUERIES)[0].astype(q.dtype)
