"""Dynamic memory compression: for every token, each head appends a slot or merges into its last one."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.ops.attention import token_cache as cache
from kvjax.ops.attention.token_cache import CHUNK, Mask, Segments
from kvjax.ops.base.dtypes import wide


class Merged(NamedTuple):
    """The slots of every head, of which the first `count` are in use; counts differ between heads.

    `weight` is the weight of the last slot, z in the paper; `start` is the slot where the open segment began.
    """

    k: Float[Array, "B S H K"]
    v: Float[Array, "B S H V"]
    weight: Float[Array, "B H"]
    start: Int[Array, "B H"]
    count: Int[Array, "B H"]


def dmc(
    q: Float[Array, "B T N K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    merge: Bool[Array, "B T H"],
    weight: Float[Array, "B T H"],
    *,
    initial_state: Merged | None = None,
    capacity: int | None = None,
    segments: Segments = None,
    mask: Mask = None,
    recurrent: bool = False,
    scale: float | None = None,
) -> tuple[Float[Array, "B T N V"], Int[Array, "B T H"], Merged]:
    """(attention over the slots after every token, how many slots a head then has, state).

    Where a head merges, its last slot becomes (z slot + w x) / (z + w) for x = k and v, and z grows by w;
    otherwise x is appended and z = w. Weights w are > 0; scale is K^-0.5 unless given. Dynamic Memory
    Compression (Nawrot et al., 2024, arXiv:2403.09636), inference with hard decisions: there merge =
    round(sigmoid(k[0] - c)) and w = sigmoid(q[0]), and both channels are zeroed afterwards, all of which the
    caller does. The relaxed merging of its training, with partial decisions, is not implemented.

    In chunks, it is attention over the running mean of every token's slot: a query sees the last token of
    each finished slot and itself. With `recurrent`, it appends or merges and attends token by token. Arrays
    are [C, S] per head, and decisions differ by head, so slots are scattered. A head with no slot appends
    whatever `merge` says. Segments are apart; tokens that mask leaves out change nothing. The state, in
    promote(float32, input), has T slots more than initial_state, or `capacity`, beyond which a head's tokens
    are not kept and its output is NaN.

    >>> x = jnp.asarray([1.0, 4.0, 5.0]).reshape(1, 3, 1, 1)
    >>> merge = jnp.asarray([False, True, False]).reshape(1, 3, 1)
    >>> o, slots, state = dmc(0 * x, x, x, merge, jnp.asarray([2.0, 1.0, 1.0]).reshape(1, 3, 1))
    >>> o.ravel().tolist(), slots.ravel().tolist(), state.k[0, :2, 0, 0].tolist()
    ([1.0, 2.0, 3.5], [1, 1, 2], [2.0, 5.0])
    """
    dtype = wide(v)
    q, k, v, weight = (x.astype(dtype) for x in (q, k, v, weight))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    state = _room(k, v, initial_state, capacity)

    def chunk(state: Merged, tokens: tuple[Array, ...]) -> tuple[Merged, tuple[Array, Array]]:
        q, k, v, merge, weight, fresh, real = tokens
        slot, first = _decide(state, merge, fresh, real)
        k, v, z, touched = _running_means(state, k, v, jnp.where(real[..., None], weight, 0), slot, real)
        out = _attend(q, k, v, state, slot, first, factor)
        ends = jnp.concatenate([slot[:, 1:] > slot[:, :-1], jnp.ones_like(touched[:, :1])], 1)
        state = _put(state, k, v, jnp.where(ends & touched, slot, state.k.shape[1]))
        last = slot[:, -1]
        state = state._replace(weight=z[:, -1], start=first[:, -1], count=last + 1)
        groups = q.shape[2] // k.shape[2]
        return state, (cache.checked(out, jnp.repeat(slot, groups, axis=2), state.k.shape[1]), slot + 1)

    tokens = (q, k, v, merge, weight, *cache.marks(q, segments, mask))
    (out, slots), state = cache.by_chunks(chunk, state, tokens, 1 if recurrent else CHUNK)
    return out, slots, state


def _room(k: Array, v: Array, before: Merged | None, capacity: int | None) -> Merged:
    """`kvjax.ops.attention.token_cache.room` with counters per head."""
    b, _, h, _ = k.shape
    none = jnp.zeros((b, h), jnp.int32)
    had = None if before is None else cache.TokenCache({"k": before.k, "v": before.v}, none[:, 0], none[:, 0])
    kept = cache.room({"k": k, "v": v}, had, capacity).kept
    if before is None:
        return Merged(kept["k"], kept["v"], jnp.zeros((b, h), k.dtype), none, none)
    return before._replace(k=kept["k"], v=kept["v"], weight=before.weight.astype(k.dtype))


def _decide(
    state: Merged, merge: Bool[Array, "B C H"], fresh: Bool[Array, "B C"], real: Bool[Array, "B C"]
) -> tuple[Int[Array, "B C H"], Int[Array, "B C H"]]:
    """(slot of every token, first slot of its segment) of every head."""
    # A real token is the first of its segment if no other real token came since the segment began.
    taken = real.astype(jnp.int32)
    earlier = jnp.cumsum(taken, 1, dtype=jnp.int32) - taken
    opening = jax.lax.cummax(jnp.where(fresh, earlier, -1), axis=1)
    empty = (state.count == state.start)[:, None]
    here, before = (opening == earlier)[..., None], ((opening < 0) & (earlier == 0))[..., None]
    appends = real[..., None] & (~merge | here | (before & empty))
    added = appends.astype(jnp.int32)
    slot = state.count[:, None] + jnp.cumsum(added, 1, dtype=jnp.int32) - 1
    opened = jax.lax.cummax(jnp.where(fresh[..., None], slot + 1 - added, 0), axis=1)
    return slot, jnp.maximum(opened, state.start[:, None])


def _running_means(
    state: Merged,
    k: Float[Array, "B C H K"],
    v: Float[Array, "B C H V"],
    weight: Float[Array, "B C H"],
    slot: Int[Array, "B C H"],
    real: Bool[Array, "B C"],
) -> tuple[Float[Array, "B C H K"], Float[Array, "B C H V"], Float[Array, "B C H"], Bool[Array, "B C H"]]:
    """Every token's slot right after it: (mean k, mean v, weight, whether a chunk's token is in it)."""
    c = slot.shape[1]
    lies = jnp.moveaxis(slot, 2, 1)
    causal = jnp.tril(jnp.ones((c, c), bool))[None, None]
    member = causal & (lies[..., :, None] == lies[..., None, :]) & real[:, None, None]
    share = jnp.where(member, jnp.moveaxis(weight, 2, 1)[:, :, None], 0).astype(k.dtype)
    carried = jnp.where(slot == state.count[:, None] - 1, state.weight[:, None], 0).astype(k.dtype)
    z = jnp.moveaxis(share.sum(-1), 1, 2) + carried
    safe = jnp.where(z == 0, 1, z).astype(k.dtype)
    share, left = share / jnp.moveaxis(safe, 2, 1)[..., None], (carried / safe)[..., None]
    last = jnp.maximum(state.count - 1, 0)[:, None, :, None]

    def mean(new: Array, old: Array) -> Array:
        return cache.mix(share, new) + left * jnp.take_along_axis(old, last, axis=1, mode="clip")

    return mean(k, state.k), mean(v, state.v), z, jnp.moveaxis(member.any(-1), 1, 2)


def _attend(
    q: Float[Array, "B C N K"],
    k: Float[Array, "B C H K"],
    v: Float[Array, "B C H V"],
    state: Merged,
    slot: Int[Array, "B C H"],
    first: Int[Array, "B C H"],
    scale: float,
) -> Float[Array, "B C N V"]:
    """Attention over kept slots and over the running means k, v of the chunk."""
    c, size = slot.shape[1], state.k.shape[1]
    lies, begins = jnp.moveaxis(slot, 2, 1)[..., None], jnp.moveaxis(first, 2, 1)[..., None]
    # The chunk's first token represents the slot that it is in, which is the last old one if it merged.
    number = jnp.arange(size, dtype=jnp.int32)[None, None, None]
    old = (number >= begins) & (number < lies[:, :, :1])
    own = lies[..., 0][:, :, None]
    follows = jnp.concatenate([own[..., 1:], own[..., -1:]], -1)
    earlier = jnp.tril(jnp.ones((c, c), bool), -1)[None, None] & (follows > own)
    new = (earlier | jnp.eye(c, dtype=bool)[None, None]) & (own >= begins)
    visible = jnp.repeat(jnp.concatenate([old, new], -1), q.shape[2] // k.shape[2], axis=1)
    scores = jnp.concatenate([cache.products(q, state.k), cache.products(q, k)], -1) * scale
    p, _ = cache.softmax(scores, visible)
    return cache.mix_both(p, state.v, v)


def _put(state: Merged, k: Array, v: Array, index: Int[Array, "B C H"]) -> Merged:
    b, _, h = index.shape
    at = (jnp.arange(b)[:, None, None], index, jnp.arange(h)[None, None])
    return state._replace(k=state.k.at[at].set(k, mode="drop"), v=state.v.at[at].set(v, mode="drop"))
