"""A token cache for attention ops, and the attention functions that they share.

Softmax over all tokens so far needs all of them, so the state of these ops is not a sum but slots: a row's
tokens, in order, in the first `count` of S slots. Slot indices alone decide which query sees which slot.
Everything here works in any float dtype, in the layout [B, T, heads, ...] like the linear attentions;
`kvjax.ops.attention.union` is the same mathematics for caches of models.

How many slots a state has: by default T more than `initial_state`, so that every token fits. With
`capacity` it has exactly that many, which keeps shapes constant over decode steps; a
token beyond them is not kept and its output is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.ops.base.packed_sequences import segment_starts
from kvjax.ops.base.row_scatter import scatter_rows
from kvjax.ops.base.softmax import softmax

# Tokens per chunk if a chunk changes the state, and queries at a time if it does not.
CHUNK, QUERIES = 32, 256
NOWHERE = jnp.iinfo(jnp.int32).max

Mask = Bool[Array, "B T"] | None
Segments = Int[Array, "B T"] | None


class TokenCache(NamedTuple):
    """Arrays [B, S, ...] by name, kept for every token; the open segment began at slot `start`."""

    kept: dict[str, Array]
    start: Int[Array, "B"]
    count: Int[Array, "B"]

    @property
    def capacity(self) -> int:
        return next(iter(self.kept.values())).shape[1]


class Places(NamedTuple):
    """The slots of new tokens. A token that is not `real` takes no slot and has that of the last real one."""

    slot: Int[Array, "B T"]
    first: Int[Array, "B T"]  # slot of the first token of its segment
    real: Bool[Array, "B T"]


def marks(like: Array, segments: Segments, mask: Mask) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
    """Which of tokens [B, T, ...] open a segment, and which are real. The first token continues the past."""
    b, t = like.shape[:2]
    fresh = segment_starts(segments, (b, t))
    return fresh, jnp.ones((b, t), bool) if mask is None else mask


def room(new: dict[str, Array], before: TokenCache | None, capacity: int | None) -> TokenCache:
    """Give the slots of `before` (or none) room for `new` more, arrays [B, T, ...], or `capacity` in all."""
    b, t = next(iter(new.values())).shape[:2]
    had = 0 if before is None else before.capacity
    size = had + t if capacity is None else capacity
    if size < had:
        raise ValueError(f"capacity is {size} slots, but initial_state has {had}: give at least as many")
    if before is None:
        kept = {n: jnp.zeros((b, size, *x.shape[2:]), x.dtype) for n, x in new.items()}
        none = jnp.zeros((b,), jnp.int32)
        return TokenCache(kept, none, none)

    def grown(x: Array, dtype: Any) -> Array:
        return jnp.pad(x.astype(dtype), [(0, 0), (0, size - had)] + [(0, 0)] * (x.ndim - 2))

    return before._replace(kept={n: grown(before.kept[n], x.dtype) for n, x in new.items()})


def places(slots: TokenCache, fresh: Bool[Array, "B T"], real: Bool[Array, "B T"]) -> Places:
    """Find the slots of new tokens after those of `slots`; only real tokens take one."""
    taken = real.astype(jnp.int32)
    slot = slots.count[:, None] + jnp.cumsum(taken, 1, dtype=jnp.int32) - 1
    opened = jax.lax.cummax(jnp.where(fresh, slot + 1 - taken, 0), axis=1)
    return Places(slot, jnp.maximum(opened, slots.start[:, None]), real)


def put(slots: TokenCache, new: dict[str, Array], at: Places) -> TokenCache:
    """`slots` with the real new tokens written; arrays not in `new` are unchanged."""
    index = jnp.where(at.real, at.slot, slots.capacity)
    kept = {n: jax.vmap(scatter_rows)(slots.kept[n], index, x) for n, x in new.items()}
    return TokenCache(slots.kept | kept, at.first[:, -1], at.slot[:, -1] + 1)


def append(
    new: dict[str, Array], before: TokenCache | None, segments: Segments, mask: Mask, capacity: int | None
) -> tuple[TokenCache, Places]:
    """Append all new tokens at once, for ops that do not change older ones."""
    slots = room(new, before, capacity)
    at = places(slots, *marks(next(iter(new.values())), segments, mask))
    return put(slots, new, at), at


def stored(slots: TokenCache) -> Int[Array, "B S"]:
    """Slot indices for `seen`, NOWHERE for empty slots."""
    number = jnp.arange(slots.capacity, dtype=jnp.int32)[None]
    return jnp.where(number < slots.count[:, None], number, NOWHERE)


def seen(at: Places, keys: Int[Array, "B S"], window: int | None = None) -> Bool[Array, "B 1 T S"]:
    """Which keys each token sees: those of its segment up to itself, or the last `window` of them."""
    key, slot, first = keys[:, None], at.slot[..., None], at.first[..., None]
    visible = (key >= first) & (key <= slot)
    return (visible if window is None else visible & (key > slot - window))[:, None]


def seen_arriving(slots: TokenCache, at: Places) -> Bool[Array, "B 1 T U"]:
    """Which slots, and which of the new tokens, are visible to tokens that are not written yet."""
    return seen(at, jnp.concatenate([stored(slots), jnp.where(at.real, at.slot, NOWHERE)], 1))


def products(q: Float[Array, "B T N K"], k: Float[Array, "B S H K"]) -> Float[Array, "B N T S"]:
    """Compute q k' of every query head with the keys of its group."""
    b, t, n, d = q.shape
    grouped = q.reshape(b, t, k.shape[2], -1, d)
    if t == 1:
        whole = _apart(grouped[:, 0]).reshape(b, n, -1)
        return jnp.einsum("bnc,bsc->bns", whole, k.reshape(*k.shape[:2], -1))[:, :, None]
    return jnp.einsum("bthgk,bshk->bhgts", grouped, k).reshape(b, n, t, -1)


def _apart(q: Float[Array, "B H G K"]) -> Float[Array, "B H G H K"]:
    """Return every head's queries in the channels of its own keys, with zeros in those of the other heads."""
    own = jnp.eye(q.shape[1], dtype=bool)[None, :, None, :, None]
    return jnp.where(own, q[:, :, :, None], jnp.zeros((), q.dtype))


def mix(p: Float[Array, "B N T S"], v: Float[Array, "B S H V"]) -> Float[Array, "B T N V"]:
    """Sum of the values of its group, weighted by p, for every query head."""
    b, n, t, s = p.shape
    heads, d = v.shape[2:]
    if t == 1:
        found = jnp.einsum("bns,bsc->bnc", p[:, :, 0], v.reshape(b, s, -1)).reshape(b, heads, -1, heads, d)
        return jnp.einsum("bhghv->bhgv", found).reshape(b, 1, n, d)
    grouped = p.reshape(b, heads, -1, t, s)
    return jnp.einsum("bhgts,bshv->bthgv", grouped, v).reshape(b, t, n, -1)


def mix_both(
    p: Float[Array, "B N T W"], old: Float[Array, "B S H V"], new: Float[Array, "B U H V"]
) -> Float[Array, "B T N V"]:
    """`mix` over slots and over new tokens after them."""
    size = old.shape[1]
    return mix(p[..., :size], old) + mix(p[..., size:], new)


def attend(
    q: Float[Array, "B T N K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    visible: Bool[Array, "B #N T S"],
    *,
    scale: float,
    bias: Float[Array, "B N T S"] | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """(softmax(scale q k' + bias) v, log of the normaliser) over the visible keys."""
    scores = products(q, k) * scale
    p, lse = softmax(scores if bias is None else scores + bias, visible)
    return mix(p, v), jnp.swapaxes(lse, 1, 2)


def checked(
    out: Float[Array, "B T N V"], slot: Int[Array, "B T #N"], capacity: int
) -> Float[Array, "B T N V"]:
    """`out`, with NaN for tokens that found no slot."""
    return jnp.where((slot < capacity)[..., None], out, jnp.nan).astype(out.dtype)


def by_chunks(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, tokens: Any, size: int
) -> tuple[Any, Any]:
    """Scan body(carry, tokens) over chunks of `size` tokens of [B, T, ...]; return (outputs, last carry).

    The last chunk is padded with zeros, which a mask of real tokens reads as False.
    """
    b, t = jax.tree.leaves(tokens)[0].shape[:2]
    if t <= size:
        carry, out = body(carry, tokens)
        return out, carry
    count = -(-t // size)

    def cut(x: Array) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, count * size - t)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(b, count, size, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(b, count * size, *x.shape[3:])[:, :t]

    carry, out = jax.lax.scan(body, carry, jax.tree.map(cut, tokens))
    return jax.tree.map(join, out), carry


def over_queries(body: Callable[[Any, Places], Array], queries: Any, at: Places, size: int) -> Array:
    """body(queries, places) over `size` queries at a time, so that no [T, S] map exists."""
    out, _ = by_chunks(lambda carry, x: (carry, body(*x)), (), (queries, at), size)
    return out
