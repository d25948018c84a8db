"""Chunks of sequences, and windows of whole blocks in which every row has its own offset.

Some memories keep the newest tokens of a row exactly and sum up older ones block by block. A window has slots
for the newest tokens, the first of them at the start of a block. It holds fewer tokens than it has slots,
because its oldest block is removed as soon as it is full. Rows may have different offsets in their blocks,
and a segment starts a new block. `scan_chunks` feeds a sequence chunk by chunk, `arrange` says where tokens
of a window and a chunk are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from kvjax.ops.base.packed_sequences import segment_numbers


class TokenChunk(NamedTuple):
    """C tokens of every row: arrays [B, C, ...], segment numbers [B, C], and which ones are real [B, C].

    `before` [B] is the number of the segment that the entering state belongs to.
    """

    tokens: Any
    number: Array
    real: Array
    before: Array


def scan_chunks(
    body: Callable[[Any, TokenChunk], tuple[Any, Any]],
    state: Any,
    tokens: Any,
    *,
    size: int,
    segments: Int[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
) -> tuple[Any, Any]:
    """`body(state, chunk) -> (state, out)` over chunks of `size` tokens, at any length: (last state, out).

    tokens and out are trees of arrays [B, T, ...], [B, size, ...] in the body. The last chunk is padded with
    zeros that are not real and belong to the last segment.
    """
    b, t = jax.tree.leaves(tokens)[0].shape[:2]
    count = -(-t // size)

    def cut(x: Array, mode: str = "constant") -> Array:
        padded = jnp.pad(x, [(0, 0), (0, count * size - t)] + [(0, 0)] * (x.ndim - 2), mode=mode)
        return jnp.moveaxis(padded.reshape(b, count, size, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(b, count * size, *x.shape[3:])[:, :t]

    def one(carry: tuple[Any, Array], at: tuple[Any, Array, Array]) -> tuple[tuple[Any, Array], Any]:
        state, before = carry
        state, out = body(state, TokenChunk(*at, before))
        return (state, at[1][:, -1]), out

    numbers = cut(segment_numbers(segments, (b, t)), "edge")
    real = cut(jnp.ones((b, t), bool) if mask is None else mask)
    start = (state, jnp.zeros((b,), jnp.int32))
    (state, _), out = jax.lax.scan(one, start, (jax.tree.map(cut, tokens), numbers, real))
    return state, jax.tree.map(join, out)


class Arrangement(NamedTuple):
    """The layout of E entries: the W slots of a window and the C tokens of a chunk after them.

    seen [B, C, E]: which entries a new token may see: of its segment, not later than itself, not empty. block
    [B, E]: block of an entry, counted from the start of the window or, in a new segment, of the segment.
    carried [B, C]: whether a new token continues the segment of the entering state. stays [B]: whether the
    last token does, so that the state after the chunk continues the entering one. leaves [B, E]: entries of
    the last segment that no longer fit into the window, a whole block or none. source [B, W], length [B]: the
    entry in each slot after the chunk, and how many slots are in use.
    """

    seen: Array
    block: Array
    carried: Array
    stays: Array
    leaves: Array
    source: Array
    length: Array


def arrange(chunk: TokenChunk, length: Int[Array, "B"], *, slots: int, block: int) -> Arrangement:
    """At most `block` tokens after a window of `slots` slots, of which `length` < slots are in use."""
    number, real = chunk.number, chunk.real
    b, c = number.shape
    same = number[:, :, None] == number[:, None]
    own = same & jnp.tril(jnp.ones((1, c, c), bool)) & real[:, None]
    carried = number == chunk.before[:, None]
    slot = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32)[None], (b, slots))
    held = slot < length[:, None]
    index = own.sum(-1, dtype=jnp.int32) - 1 + jnp.where(carried, length[:, None], 0)
    index = jnp.concatenate([slot, index], 1)

    stays = carried[:, -1]
    ends = jnp.concatenate([held & stays[:, None], real & (number == number[:, -1:])], 1)
    total = ends.sum(1, dtype=jnp.int32)
    # A chunk is no longer than a block, so the window overflows by less than one block.
    moved = index - jnp.where(total >= slots, block, 0)[:, None]
    target = jnp.where(ends & (moved >= 0), moved, slots)
    entry = jnp.broadcast_to(jnp.arange(slots + c, dtype=jnp.int32)[None], target.shape)
    source = jax.vmap(lambda to, e: jnp.zeros((slots,), jnp.int32).at[to].set(e, mode="drop"))(target, entry)
    return Arrangement(
        seen=jnp.concatenate([carried[:, :, None] & held[:, None], own], 2),
        block=index // block,
        carried=carried,
        stays=stays,
        leaves=ends & (moved < 0),
        source=source,
        length=jnp.where(total >= slots, total - block, total),
    )


def refill(entries: Shaped[Array, "B E *rest"], at: Arrangement) -> Shaped[Array, "B W *rest"]:
    """Fill the window's slots after a chunk from their entries, zero where there is none."""
    extra = (1,) * (entries.ndim - 2)
    used = jnp.arange(at.source.shape[1], dtype=jnp.int32)[None] < at.length[:, None]
    picked = jnp.take_along_axis(entries, at.source.reshape(*at.source.shape, *extra), axis=1)
    return jnp.where(used.reshape(*used.shape, *extra), picked, jnp.zeros((), entries.dtype))
