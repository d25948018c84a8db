"""The GPU kernel of decoding over codes of 1, 2 or 4 bits with scales per group, as KIVI stores them.

A step takes rows of words, each of which holds some tokens of one group. Each place within the words is a
plane of tokens, unpacked by one shift and attended to separately: the same program code for all planes, which
compiles in a second and not in a minute. The zeros of values are summed over tokens at the very end,
because such a sum makes the warps of a program wait for each other. `ops.decode.grouped_decode` defines the
result, and what split kernels share is in `partial_gpu`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kvjax.pallas_kernels import partial_gpu as parts
from kvjax.pallas_kernels.halves import halves
from kvjax.pallas_kernels.partial_gpu import NEG_INF, Cut


class Sizes(NamedTuple):
    """Static arguments: the split, bits of a code, tokens (keys) or channels (values) of a group."""

    cut: Cut
    bits: int
    group: int
    scale: float
    softcap: float | None = None

    @property
    def rows(self) -> int:
        """How many rows of words a group has."""
        return self.group * self.bits // 32

    @property
    def middle(self) -> int:
        """Half of the codes' range, which is subtracted so that sums of codes and of zeros do not cancel."""
        return 2 ** (self.bits - 1)


def _token(plane: Any, row: Any, sizes: Sizes) -> Any:
    """Which tokens of their groups the rows [block] hold in a plane: see `ops.base.bit_packing.pack_tokens`.

    A word has 8 consecutive tokens in every part of its group.
    """
    part, number = jax.lax.div(plane, 8), jax.lax.rem(plane, 8)
    return part * (sizes.group * sizes.bits // 4) + number + 8 * jax.lax.rem(row, sizes.rows)


def _kernel(layer, lengths, q, words, numbers, value_words, value_numbers, out, lse, *, sizes: Sizes) -> None:
    i, split, cut = pl.program_id(0), pl.program_id(1), sizes.cut
    length, first = lengths[i], split * (cut.blocks * cut.block)
    kind = jnp.float32 if q.dtype == jnp.float32 else jnp.bfloat16
    queries, width = q[i].astype(kind), words.shape[3]
    load, parted = partial(_load, layer[0], i), width // sizes.group

    def visit(step: Any, running: parts.Running) -> parts.Running:
        row = first + step * cut.block + jnp.arange(cut.block)
        group = jax.lax.div(row, sizes.rows)
        live = group * sizes.group < length
        lanes = jnp.arange(queries.shape[1])
        scale, zero = halves(load(numbers, group, lanes, live))
        base = parts.product(queries, (zero + sizes.middle * scale).astype(kind), 1)
        keys, scale = load(words, row, lanes, live), scale.astype(kind)
        channels = [n * sizes.group + jnp.arange(sizes.group) for n in range(width // sizes.group)]
        values = [load(value_words, row, channel, live) for channel in channels]

        def one(plane: Any, running: parts.Running) -> parts.Running:
            within = _token(plane, row, sizes)
            token = group * sizes.group + within
            z = parts.product(queries, _code(keys, plane, sizes, kind) * scale, 1) + base
            z = z * sizes.scale
            z = z if sizes.softcap is None else sizes.softcap * jnp.tanh(z / sizes.softcap)
            running, (p,) = parts.weigh(running, jnp.where((token < length)[None], z, NEG_INF))
            acc, zeros = [], []
            for n, (own, codes) in enumerate(zip(running.acc[:parted], values, strict=True)):
                at = value_numbers.at[layer[0], i, group, n * sizes.group + within]
                step_of, zero_of = halves(plt.load(at, mask=token < length, other=0))
                zeros.append(running.acc[parted + n] + p * (zero_of + sizes.middle * step_of)[None])
                codes = _code(codes, plane, sizes, kind)
                acc.append(own + parts.product((p * step_of[None]).astype(kind), codes, 0))
            return running._replace(acc=(*acc, *zeros))

        return jax.lax.fori_loop(0, 32 // sizes.bits, one, running)

    running = parts.nothing_yet(queries.shape[0], [sizes.group] * parted + [cut.block] * parted)
    turns = parts.trips(pl.cdiv(length, sizes.group) * sizes.rows, first, cut)
    r = jax.lax.fori_loop(0, turns, visit, running)
    summed = tuple(x + y.sum(1)[:, None] for x, y in zip(r.acc[:parted], r.acc[parted:], strict=True))
    parts.finish(r._replace(acc=summed), out, lse, i, split, cut.queries)


def _load(layer: Any, i: Any, ref: Any, row: Any, lane: Any, live: Any) -> Any:
    """Words [block, lanes] of rows of KV head i, 0 where `live` is false."""
    wanted = jnp.broadcast_to(live[:, None], (row.shape[0], lane.shape[0]))
    if ref.shape[3] % lane.shape[0]:
        wanted = wanted & (lane < ref.shape[3])[None]
    return plt.load(ref.at[layer, i, *parts.grid(row, lane)], mask=wanted, other=0)


def _code(words: Any, plane: Any, sizes: Sizes, kind: Any) -> Any:
    """Read a plane's codes minus the middle, without conversions, of which a GPU does few at a time."""
    shift = 4 * jax.lax.rem(plane, 8) + sizes.bits * jax.lax.div(plane, 8)
    code = (words.astype(jnp.int32) >> shift) & (2**sizes.bits - 1)
    if kind == jnp.float32:
        return code.astype(kind) - sizes.middle
    # The last bit of a bfloat16's fraction counts units in 128 + code.
    lifted = jax.lax.bitcast_convert_type((code | 0x4300).astype(jnp.int16), jnp.bfloat16)
    return lifted - jnp.bfloat16(128 + sizes.middle)


def grouped_decode(
    q: jax.Array,
    caches: tuple[jax.Array, ...],
    lengths: jax.Array,
    layer: jax.Array,
    *,
    sizes: Sizes,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Parts (out [I, C, Q, W], lse [I, C, R]) of I KV heads in C splits, Q the real queries.

    q [I, R, W'] with R and W' powers of two from 16, W' at least W, a multiple of the group; caches: words
    [L, I, S bits / 32, W] and scales [L, I, S / group, W] of keys, then of values; lengths [I]; layer [1].
    """
    lists, count, _ = q.shape
    cut, width = sizes.cut, caches[0].shape[3]
    shapes = [(lists, cut.splits, cut.queries, width), (lists, cut.splits, count)]
    made = parts.call(partial(_kernel, sizes=sizes), cut, shapes, "grouped_decode", interpret)
    return tuple(made(layer, lengths, q, *caches))
