"""The TPU kernel that writes one token per KV head into pages of words; see `ops.decode.paged_append`.

It finds the pages itself and takes keys and values unconverted: every small operation of XLA's before it
would take as long as its copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas_kernels.append.tiles import rewrite
from kvjax.pallas_kernels.scalars import split
from kvjax.pallas_kernels.streaming import SUBLANES

# KV heads per grid step.
LISTS = 64


class Page(NamedTuple):
    """The place of a token in a page: static.

    starts: the first rows of the codes, and `side` of the numbers, whole tiles each. word: slot -> (row
    after a start, index of its lowest bit). bits: of a code. height: rows per number.
    """

    tokens: int
    starts: tuple[int, ...]
    side: int
    word: Callable[[Any], tuple[Any, Any]]
    bits: int
    height: int


def _kernel(layer: Any, lengths: Any, table: Any, *refs: Any, page: Page, pages: int, numbers: int) -> None:
    parts = len(page.starts)
    given, new, (_, pool, tiles, come, gone, raw, codes, arrived, block, slot), side = _cut(
        refs, numbers, parts, 10
    )
    chunk, heads, most = slot.shape[0], lengths.shape[1], table.shape[2]
    first = pl.program_id(0) * chunk

    def fetch(j: Any) -> Any:
        return pltpu.make_async_copy(new[j], raw.at[j], arrived)

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        for j in range(parts):
            fetch(j).start()

    def of(x: Any, n: Any) -> Any:
        return x[split(first + n, heads)]

    def find(n: Any) -> Any:
        length = of(lengths, n)
        fits = (length >= 0) & (length < most * page.tokens)
        at, within = split(jnp.where(fits, length, 0), page.tokens)
        block[n] = layer[0] * pages + table[first + n, 0, at]
        slot[n] = jnp.where(fits, within, -1)

    def places(n: Any) -> list[tuple[Any, Any]]:
        own = pool.at[block[n]]
        row, _ = page.word(slot[n])
        within = pl.multiple_of(split(row, SUBLANES)[0] * SUBLANES, SUBLANES)
        found = [(own.at[pl.ds(x + within, SUBLANES)], tiles.at[n, j]) for j, x in enumerate(page.starts)]
        return found + [(own.at[pl.ds(page.side, buffer.shape[1])], buffer.at[n]) for buffer in side]

    def change(n: Any) -> None:
        row, low = page.word(slot[n])
        mask = jnp.left_shift(np.uint32(2**page.bits - 1).astype(np.int32), low)
        for j in range(parts):
            old = tiles[n, j]
            here = jax.lax.broadcasted_iota(jnp.int32, old.shape, 0) == split(row, SUBLANES)[1]
            word = jnp.left_shift(codes[j, pl.ds(first + n, 1)], low) & mask
            tiles[n, j] = jnp.where(here, (old & ~mask) | word, old)
        for buffer in side:
            old, width = buffer[n], buffer.shape[2]
            place = jax.lax.broadcasted_iota(jnp.int32, old.shape, 0) * width
            place = place + jax.lax.broadcasted_iota(jnp.int32, old.shape, 1)
            for i, x in enumerate(given):
                word = jax.lax.bitcast_convert_type(jnp.full(old.shape, of(x, n)), jnp.int32)
                old = jnp.where(place == i * page.height * width + slot[n], word, old)
            buffer[n] = old

    def convert() -> None:
        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            for j in range(parts):
                fetch(j).wait()
            codes[...] = _bits(raw[...])

    rewrite(chunk, lambda n: slot[n] >= 0, places, change, (come, gone), find=find, meanwhile=convert)


def _cut(refs: Sequence[Any], *sizes: int) -> list[Sequence[Any]]:
    """Cut refs into pieces of these sizes, and the rest."""
    cuts = np.cumsum([0, *sizes]).tolist()
    return [refs[a:b] for a, b in zip(cuts, [*cuts[1:], None], strict=True)]


def _bits(x: jax.Array) -> jax.Array:
    """Return the bits of x as the low bits of words; a kernel has no bitcast of narrow types."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.int32)
    whole = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return whole if x.dtype == jnp.float32 else jax.lax.shift_right_logical(whole, 16)


def append_words(
    pool: jax.Array,
    new: Sequence[jax.Array],
    numbers: Sequence[jax.Array],
    table: jax.Array,
    lengths: jax.Array,
    layer: jax.Array,
    *,
    page: Page,
    interpret: Any = False,
) -> jax.Array:
    """Return the pool [L, P, R, W] of int32 words, updated in place with a token at the end of every KV head.

    new: per start of codes [B * K, W] of float32, bfloat16 or integers. numbers: [B, K] of float32. table
    [B * K, 1, M]; lengths [B, K], below 0 to write nothing; layer [1].
    """
    lists = table.shape[0]
    layers, pages, rows, width = pool.shape
    chunk = next(n for n in range(min(lists, LISTS), 0, -1) if lists % n == 0)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    side = [pltpu.VMEM((chunk, rows - page.side, width), pool.dtype)] if numbers else []
    done = pl.pallas_call(
        partial(_kernel, page=page, pages=pages, numbers=len(numbers)),
        out_shape=jax.ShapeDtypeStruct((layers * pages, rows, width), pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3 + len(numbers),
            grid=(lists // chunk,),
            in_specs=[anywhere] * (len(new) + 1),
            out_specs=anywhere,
            scratch_shapes=[
                pltpu.VMEM((chunk, len(new), SUBLANES, width), pool.dtype),
                pltpu.SemaphoreType.DMA((chunk,)),
                pltpu.SemaphoreType.DMA,
                pltpu.VMEM((len(new), lists, width), new[0].dtype),
                pltpu.VMEM((len(new), lists, width), pool.dtype),
                pltpu.SemaphoreType.DMA,
                pltpu.SMEM((chunk,), jnp.int32),
                pltpu.SMEM((chunk,), jnp.int32),
                *side,
            ],
        ),
        input_output_aliases={3 + len(numbers) + len(new): 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=True, has_side_effects=True
        ),
        interpret=interpret,
        name="paged_append",
    )(layer, lengths, table, *numbers, *new, pool.reshape(layers * pages, rows, width))
    return done.reshape(pool.shape)
