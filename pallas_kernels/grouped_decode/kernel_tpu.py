"""The TPU kernel of decoding over codes of 1, 2 or 4 bits with scales per group, as KIVI stores them.

Words of codes and words of scales are in one array each for all layers, tokens along the rows; a step copies
the rows of a block of one head's slots from all four. `ops.decode.grouped_decode` defines the result.

A word holds tokens of `planes` parts of its group. So the columns of a block's logits are not its slots
in order: for every 8 groups, first come all tokens of plane 0, then those of plane 1. Only the mask needs
to know the slot of a column.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas_kernels import streaming
from kvjax.pallas_kernels.halves import halves
from kvjax.pallas_kernels.streaming import LANES, NEG_INF, SUBLANES, Running


class Sizes(NamedTuple):
    """Static arguments: slots per step, bits of a code, tokens (of keys) or channels (of values) of a group.

    lists: KV heads per core.
    """

    block: int
    bits: int
    group: int
    lists: int
    scale: float
    softcap: float | None = None

    @property
    def tile(self) -> int:
        """Slots whose scales fill the rows of one memory tile, which is the unit of copies."""
        return SUBLANES * self.group

    @property
    def planes(self) -> int:
        return 4 // self.bits

    @property
    def run(self) -> int:
        """Consecutive tokens of one group in one plane."""
        return self.group // self.planes

    @property
    def per_row(self) -> tuple[int, ...]:
        """Tokens of a row of each array: codes and scales of keys, codes and scales of values."""
        return (32 // self.bits, self.group) * 2


def _kernel(layer: Any, lengths: Any, *refs: Any, sizes: Sizes) -> None:
    q, *caches, out, lse = refs[:7]
    *buffers, turn, arrived, top, total, acc = refs[7:]
    j = pl.program_id(1)
    mine = pl.program_id(0) * sizes.lists + j
    more = j + 1 < sizes.lists
    at = (mine, jnp.where(more, mine + 1, mine))
    length = [lengths[i] for i in at]
    block, tile = sizes.block, sizes.tile

    def copies(ahead: Any, s: Any, slot: Any, act: Any) -> None:
        def some(first: Any, count: int) -> None:
            for cache, buffer, per in zip(caches, buffers, sizes.per_row, strict=True):
                rows, unit = count // per, tile // per
                begin = pl.multiple_of((s * block + first) // per, unit)
                target = buffer.at[slot, pl.ds(pl.multiple_of(first // per, unit), rows)]
                source = cache.at[layer[0], streaming.pick(ahead, *at), pl.ds(begin, rows)]
                act(pltpu.make_async_copy(source, target, arrived.at[slot]))

        live = jnp.clip(pl.cdiv(streaming.pick(ahead, *length) - s * block, tile), 0, block // tile)
        streaming.each(live, block // tile, lambda: some(0, block), lambda n: some(n * tile, tile))

    running = Running(top, total, acc)
    streaming.clear(running)
    visit = partial(_attend, q, buffers, running, sizes, length[0])
    streaming.stream(turn, (0, pl.cdiv(length[0], block)), 0, more, copies, visit)
    streaming.finish(running, out, lse)


def _attend(q: Any, buffers: Any, running: Running, sizes: Sizes, length: Any, s: Any, slot: Any) -> None:
    """Fold a block of slots into the running softmax."""
    kind = jnp.float32 if q.dtype == jnp.float32 else jnp.bfloat16
    words, numbers, value_words, value_numbers = (b[slot] for b in buffers)
    asked = q[0].astype(jnp.float32)
    tiles = range(sizes.block // sizes.tile)
    z = [_logits(asked, _codes(words, n, sizes, kind), _tile(numbers, n), sizes) for n in tiles]
    z = jnp.concatenate(z, axis=1) * sizes.scale
    if sizes.softcap is not None:
        z = sizes.softcap * jnp.tanh(z / sizes.softcap)
    z = jnp.where(_live(length - s * sizes.block, sizes), z, NEG_INF)
    p, fade = streaming.weigh(running, z)
    own = _values(p, value_words, value_numbers, sizes, kind)
    running.acc[...] = running.acc[...] * fade + own


def _tile(numbers: Any, n: int) -> Any:
    """Words [8, W] of the scales and zeros of a tile."""
    return numbers[n * SUBLANES : (n + 1) * SUBLANES]


def _codes(words: Any, tile: int, sizes: Sizes, kind: Any) -> Any:
    """Codes [tokens, W] of one tile, plane by plane, of type `kind`, as `_shifted` expects them.

    The hardware widens signed numbers of 4 bits. A code becomes the upper bits of such a number, with its
    upper bit flipped as the sign: values are centred at 0, and their sums keep their precision.
    """
    rows = sizes.tile // sizes.per_row[0]
    x = jax.lax.bitcast_convert_type(words[tile * rows : (tile + 1) * rows], jnp.int32)
    upper = {1: -0x77777778, 2: -0x33333334, 4: -1}[sizes.bits]
    planes = [jax.lax.shift_left(x, 4 - sizes.bits * (i + 1)) for i in range(sizes.planes)]
    signed = [(plane ^ jnp.int32(-0x77777778)) & jnp.int32(upper) for plane in planes]
    return jnp.concatenate([pltpu.bitcast(n, jnp.int4).astype(kind) for n in signed], axis=0)


def _shifted(scale: Any, zero: Any, sizes: Sizes) -> tuple[Any, Any]:
    """Scale and zero for the numbers that `_codes` returns instead of codes."""
    return scale * 2.0 ** (sizes.bits - 4), zero + 2.0 ** (sizes.bits - 1) * scale


def _logits(asked: Any, codes: Any, numbers: Any, sizes: Sizes) -> Any:
    """Compute q k' [R, tokens] of a tile's keys, whose 8 groups have a row of scales and zeros each.

    Queries are multiplied by the scales, so that one product serves all groups; each column takes its group's
    row.
    """
    count = asked.shape[0]
    scale, zero = _shifted(*halves(numbers), sizes)
    rows = [slice(i, i + 1) for i in range(SUBLANES)]
    scaled = jnp.concatenate([asked * scale[r] for r in rows]).astype(codes.dtype)
    sums = [(asked * zero[r]).sum(-1, keepdims=True) for r in rows]
    z = streaming.product(scaled, codes, 1)
    across = LANES // sizes.run
    place = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1) // sizes.run
    found = []
    for first in range(0, codes.shape[0], LANES):
        group = first // sizes.run % SUBLANES
        out = jnp.zeros((count, LANES), jnp.float32)
        for i in range(across):
            own = z[(group + i) * count :][:count, first : first + LANES] + sums[group + i]
            out = own if i == 0 else jnp.where(place == i, own, out)
        found.append(out)
    return jnp.concatenate(found, axis=1)


def _live(count: Any, sizes: Sizes) -> Any:
    """Whether the slot of every column of a block [1, block] is among the first `count`."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    # The columns of 128 lanes are runs of as many groups.
    slot = lane // sizes.run * sizes.group + lane % sizes.run
    found = []
    for column in range(0, sizes.block, LANES):
        tile, within = divmod(column, sizes.tile)
        plane, place = divmod(within, SUBLANES * sizes.run)
        first = tile * sizes.tile + place // sizes.run * sizes.group + plane * sizes.run
        found.append(slot + first < count)
    return jnp.concatenate(found, axis=1)


def _values(p: Any, words: Any, numbers: Any, sizes: Sizes, kind: Any) -> Any:
    """Sum p[r, s] value[s, h] over s, of values = scale * code + zero with numbers per group of channels."""
    width, count = words.shape[1], p.shape[0]
    groups, tiles = width // sizes.group, sizes.block // sizes.tile
    per_tile, across = sizes.tile // LANES, LANES // sizes.run
    turned = [_by_group(_tile(numbers, n), sizes) for n in range(tiles)]
    weights: list[list[Any]] = [[] for _ in range(groups)]
    zeros = [jnp.zeros((count, LANES), jnp.float32)] * groups
    for n in range(sizes.block // LANES):
        tile, within = divmod(n, per_tile)
        plane, part = divmod(within, per_tile // sizes.planes)
        given = p[:, n * LANES : (n + 1) * LANES]
        for g in range(groups):
            half, own = divmod(g, LANES // sizes.group)
            row = part * across + own * sizes.planes + plane
            scale, zero = (x[row : row + 1] for x in turned[tile][half])
            weights[g].append(given * scale)
            zeros[g] = zeros[g] + given * zero
    stacked = jnp.concatenate([jnp.concatenate(x, axis=1) for x in weights], axis=0)
    codes = jnp.concatenate([_codes(words, n, sizes, kind) for n in range(tiles)], axis=0)
    found = streaming.product(stacked.astype(kind), codes, 0)
    channel = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1) // sizes.group
    out = jnp.zeros((count, width), jnp.float32)
    for g in range(groups):
        mine = found[g * count : (g + 1) * count] + zeros[g].sum(-1, keepdims=True)
        out = jnp.where(channel == g, mine, out)
    return out


def _by_group(numbers: Any, sizes: Sizes) -> list[tuple[Any, Any]]:
    """Scales and zeros of a tile's values, [8, 128] each, per 128 lanes: groups of channels on the rows.

    A stored row is a group of tokens; its lanes hold the tokens for the first group of channels, then those
    for the second, and so on. This transposes: in every `across` rows, the run of tokens at place n of row m
    goes to place m of row n.
    """
    bits = jax.lax.bitcast_convert_type(numbers, jnp.int32)
    across = LANES // sizes.run
    row = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0) % across
    place = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1) // sizes.run
    found = []
    for first in range(0, bits.shape[1], LANES):
        x = out = bits[:, first : first + LANES]
        for d in range(1, across):
            moved = pltpu.roll(x, d * sizes.run, 1)
            up, down = (pltpu.roll(moved, n % SUBLANES, 0) for n in (SUBLANES - d, across - d))
            out = jnp.where(place == (row + d) % across, jnp.where(row + d < across, up, down), out)
        found.append(_shifted(*halves(out), sizes))
    return found


def grouped_decode(
    q: jax.Array,
    caches: tuple[jax.Array, ...],
    lengths: jax.Array,
    layer: jax.Array,
    *,
    sizes: Sizes,
    cores: int = 1,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """(out [I, R, W], lse [I, R, 128]) of I KV heads.

    q [I, R, W] with R a multiple of 8 and W of 128; caches: codes and scales of keys, codes and scales of
    values, [L, I, rows, W] uint32, of whole tiles of slots; lengths [I]; layer [1].
    """
    lists, count, width = q.shape
    of = partial(streaming.spec_of_list, lists, sizes.lists)
    return pl.pallas_call(
        partial(_kernel, sizes=sizes),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((lists, count, LANES), jnp.float32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(cores, sizes.lists),
            in_specs=[of(count, width), *[pl.BlockSpec(memory_space=pl.ANY)] * len(caches)],
            out_specs=[of(count, width), of(count, LANES)],
            scratch_shapes=[
                *(pltpu.VMEM((2, sizes.block // per, width), jnp.uint32) for per in sizes.per_row),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((count, LANES), jnp.float32),
                pltpu.VMEM((count, LANES), jnp.float32),
                pltpu.VMEM((count, width), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="grouped_decode",
    )(layer, lengths, q, *caches)
