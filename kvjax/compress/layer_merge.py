"""Layer merging: how a prefill merges two layers into one.

A pair of layers shares one body, which stores a direction per token once and the length of its vector for
each layer. Directions are stored with the lower layer, and each layer stores its own lengths. Tokens that
are not merged, and later tokens, are in the tail of each layer. Both layers hold the same tokens in the
same slots.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.compress.group import GroupMethod
from kvjax.compress.segments import taken_slots, whole_tiles
from kvjax.compress.select import ComputedTokens, union
from kvjax.grammar.kinds import View
from kvjax.keep.select import top
from kvjax.state.cache import GroupState, Slots
from kvjax.state.codes import Codes
from kvjax.state.write import pad_slots, write_rows


class PairLayer(NamedTuple):
    """One layer of a pair: its group method, what it holds, and what it computed for new tokens."""

    gm: GroupMethod
    past: GroupState
    fresh: ComputedTokens


def merge_pair(
    lower: PairLayer,
    upper: PairLayer,
    pos: Int[Array, "B T"],
    length: Int[Array, "B"],
    *,
    tokens: int,
    room: int,
) -> tuple[GroupState, GroupState]:
    """Merge the tails and new tokens of two layers after a prefill; return both groups.

    What was merged before stays as it is. tokens: a bound of any row's length. room: for how many more
    tokens.
    """
    stack = lower.gm.stack
    assert stack is not None
    low, high = (
        union(x.gm, dataclasses.replace(x.past, bodies=()), (), x.fresh._replace(masses=()), pos)
        for x in (lower, upper)
    )
    live = low.pos >= 0
    apart = top(
        stack.apart((low.k, high.k), (low.v, high.v), live),
        jnp.broadcast_to(stack.most.count(length)[None, :, None], live.shape[:3]),
    )
    # A row without new tokens, such as one that ended in an earlier chunk, is unchanged.
    apart = live & (apart | (pos < 0).all(-1)[None, :, None, None])
    capacity = whole_tiles(tokens, low.k.shape[-1])
    keys, values = (
        stack.merge(x, y, codec)
        for x, y, codec in zip((low.k, low.v), (high.k, high.v), lower.gm.codecs, strict=True)
    )

    def group(half: PairLayer, view: View, k: Codes, v: Codes) -> GroupState:
        body = _appended(half.past, Slots(k, v, view.pos), live & ~apart, capacity)
        return GroupState((body,), taken_slots(half.gm, view, apart, tokens, room))

    return group(lower, low, keys[0], values[0]), group(upper, high, keys[1], values[1])


def _appended(past: GroupState, new: Slots, which: Bool[Array, "Lg B K S"], capacity: int) -> Slots:
    """Append to a layer's merged slots those of `new` that `which` selects, in `capacity` slots."""
    if past.bodies:
        (old,) = past.bodies
        assert isinstance(old, Slots)
        body = pad_slots(old, capacity - old.capacity)
    else:
        empty = jax.tree.map(lambda x: jnp.zeros((*x.shape[:3], capacity, *x.shape[4:]), x.dtype), new)
        body = dataclasses.replace(empty, pos=jnp.full_like(empty.pos, -1))
    start = (body.pos >= 0).sum(-1, dtype=jnp.int32)[..., None]
    slot = jnp.where(which, start + jnp.cumsum(which, -1, dtype=jnp.int32) - 1, -1)
    return jax.tree.map(lambda x, y: write_rows(x, slot, y), body, new)
