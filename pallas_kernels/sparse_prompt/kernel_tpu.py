"""The TPU kernel of sparse prompts: one segment of queries, and the blocks of keys that were picked for it.

A program copies picked blocks from HBM, a tile of several at a time, while it attends to the tile before; the
first tile of the next segment is copied during the last one of this segment. Blocks that were not picked are
neither copied nor computed. `kvjax.ops.attention.sparse_prompt` defines the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas_kernels.flash_prefill.tiles import (
    LANES,
    LOG2E,
    NEG_INF,
    NT,
    chunks,
    dot,
    folded,
    in_turn,
    lanes,
    logits,
    matrix_dtype,
)
from kvjax.pallas_kernels.streaming import pick, spec_of_list, stream

# The index of keys that no query sees.
HIDDEN = 2**30
VMEM_BYTES = 48 * 2**20


class Sizes(NamedTuple):
    """Static arguments: queries per segment, keys per block, blocks per tile, and the logits' parameters.

    rows: how many queries of a head are processed at once.
    """

    segment: int
    block: int
    together: int
    scale: float
    softcap: float | None = None
    rows: int = 256

    @property
    def tile(self) -> int:
        return self.together * self.block


class Refs(NamedTuple):
    """Operands, results and scratch memory.

    counts [R, I] and lengths [R]; order [1, 1, J]: the picked blocks of this segment in ascending order, and
    of the next one.
    """

    counts: Any
    lengths: Any
    order: Any
    next_order: Any
    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    keys: Any
    values: Any
    arrived: Any
    turn: Any
    top: Any
    total: Any
    acc: Any


def _kernel(*refs: Any, sizes: Sizes) -> None:
    r = Refs(*refs)
    row, segment = pl.program_id(0), pl.program_id(1)
    segments, lists, heads = pl.num_programs(1), r.lengths.shape[0] // r.k.shape[0], r.k.shape[1]
    at, more = row * segments + segment, segment + 1 < segments
    sequence, head = row // lists, jax.lax.rem(row, lists) * heads // lists

    def steps(ahead: Any) -> Any:
        place = jnp.minimum(at + ahead, r.counts.shape[0] - 1)
        return (r.counts[place] + sizes.together - 1) // sizes.together

    def copies(ahead: Any, s: Any, slot: Any, act: Callable[[Any], None]) -> None:
        @pl.when(s < steps(jnp.asarray(ahead, jnp.int32)))
        def _() -> None:
            for n in range(sizes.together):
                place = s * sizes.together + n
                block = pick(ahead, r.order[0, 0, place], r.next_order[0, 0, place])
                start = pl.multiple_of(block * sizes.block, sizes.block)
                here = pl.ds(n * sizes.block, sizes.block)
                for source, target, number in ((r.k, r.keys, 0), (r.v, r.values, 1)):
                    act(
                        pltpu.make_async_copy(
                            source.at[sequence, head, pl.ds(start, sizes.block)],
                            target.at[slot, here],
                            r.arrived.at[slot, number],
                        )
                    )

    r.top[...] = jnp.full_like(r.top, NEG_INF)
    r.total[...] = jnp.zeros_like(r.total)
    r.acc[...] = jnp.zeros_like(r.acc)
    visit = partial(_visit, r, r.counts[at], r.lengths[row], segment, sizes)
    stream(r.turn, (0, steps(0)), 0, more, copies, visit)
    for g in range(r.q.shape[2]):
        total = r.total[g].sum(-1, keepdims=True)
        safe = jnp.where(total == 0.0, 1.0, total)
        r.out[0, 0, g] = (r.acc[g] / safe).astype(r.out.dtype)
        lse = jnp.where(total == 0.0, NEG_INF, r.top[g, :, :1] / LOG2E + jnp.log(safe))
        r.lse[0, 0, 0, g : g + 1] = jnp.broadcast_to(lse, (lse.shape[0], LANES)).T[:1]


def _visit(r: Refs, count: Any, length: Any, segment: Any, sizes: Sizes, s: Any, slot: Any) -> None:
    """Fold the tile in buffer `slot`; a tile that all queries see whole takes no mask."""
    end = (s + 1) * sizes.together
    last = r.order[0, 0, jnp.minimum(end, count) - 1]
    first = segment * sizes.segment
    whole = (end <= count) & ((last + 1) * sizes.block <= first) & (first + sizes.segment <= length)
    fold = partial(_fold, r, count, length, first, sizes, s, slot)
    pl.when(whole)(partial(fold, whole=True))
    pl.when(jnp.logical_not(whole))(partial(fold, whole=False))


def _fold(
    r: Refs, count: Any, length: Any, first: Any, sizes: Sizes, s: Any, slot: Any, *, whole: bool
) -> None:
    kind = matrix_dtype(r.q)
    k, v = r.keys[slot].astype(kind), r.values[slot].astype(kind)

    def index(shape: tuple[int, int], axis: int) -> Any:
        """Return the tokens that the tile's keys are."""
        place = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        start = jnp.full(shape, HIDDEN, jnp.int32)
        for n in range(sizes.together):
            number = s * sizes.together + n
            token = jnp.where(number < count, (r.order[0, 0, number] - n) * sizes.block, HIDDEN)
            start = jnp.where(place >= n * sizes.block, token, start)
        return place + start

    key = None
    if not whole:
        key = index((1, sizes.tile), 1)
        # Keys after the end may be NaN, and zero times NaN is NaN.
        live = lanes(index((sizes.tile, LANES), 0), v.shape[1]) < length
        v = jnp.where(live, v.astype(jnp.float32), 0.0).astype(kind)

    def score(g: int, rows: slice) -> Any:
        return dot(r.q[0, 0, g, rows].astype(kind), k, NT)

    def fold(g: int, rows: slice, x: Any) -> None:
        z = logits(x, sizes)
        if key is not None:
            asked = first + rows.start + jax.lax.broadcasted_iota(jnp.int32, (z.shape[0], 1), 0)
            z = jnp.where(key <= jnp.where(asked < length, asked, -1), z, NEG_INF)
        folded(r, g, rows, z, v, whole=whole)

    in_turn(list(chunks(r.q.shape[2], r.q.shape[3], sizes.rows)), score, fold)


def sparse_prompt(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    order: jax.Array,
    counts: jax.Array,
    lengths: jax.Array,
    *,
    sizes: Sizes,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """(out [B, P, G, T, V], lse [B, P, I, G, T / I]) of q [B, P, G, T, H], k [B, K, T, H], v [B, K, T, V].

    order [B P I, 1, J]: the blocks of I segments of P lists, the picked first and ascending, J a multiple
    of the blocks per tile. counts [B P I]: how many were picked. lengths [B P]: tokens of each row.
    """
    b, lists, group, tokens, h = q.shape
    width, segments = v.shape[3], tokens // sizes.segment

    def of_segment(row: Any, i: Any, *_: Any) -> tuple[Any, ...]:
        return row // lists, jax.lax.rem(row, lists), 0, i, 0

    def lse_at(row: Any, i: Any, *_: Any) -> tuple[Any, ...]:
        return row // lists, jax.lax.rem(row, lists), i, 0, 0

    order_spec = partial(
        spec_of_list, b * lists * segments, segments, *order.shape[1:], memory_space=pltpu.SMEM
    )
    scratch = (group, sizes.segment)
    return tuple(
        pl.pallas_call(
            partial(_kernel, sizes=sizes),
            out_shape=[
                jax.ShapeDtypeStruct((b, lists, group, tokens, width), q.dtype),
                jax.ShapeDtypeStruct((b, lists, segments, group, sizes.segment), jnp.float32),
            ],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(b * lists, segments),
                in_specs=[
                    order_spec(),
                    order_spec(ahead=1),
                    pl.BlockSpec((1, 1, group, sizes.segment, h), of_segment),
                    pl.BlockSpec(memory_space=pl.ANY),
                    pl.BlockSpec(memory_space=pl.ANY),
                ],
                out_specs=[
                    pl.BlockSpec((1, 1, group, sizes.segment, width), of_segment),
                    pl.BlockSpec((1, 1, 1, group, sizes.segment), lse_at),
                ],
                scratch_shapes=[
                    pltpu.VMEM((2, sizes.tile, h), k.dtype),
                    pltpu.VMEM((2, sizes.tile, width), v.dtype),
                    pltpu.SemaphoreType.DMA((2, 2)),
                    pltpu.SMEM((1,), jnp.int32),
                    pltpu.VMEM((*scratch, LANES), jnp.float32),
                    pltpu.VMEM((*scratch, LANES), jnp.float32),
                    pltpu.VMEM((*scratch, width), jnp.float32),
                ],
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"),
                disable_bounds_checks=True,
                vmem_limit_bytes=VMEM_BYTES,
            ),
            interpret=interpret,
            name="sparse_prompt",
        )(counts, lengths, order, order, q, k, v)
    )
