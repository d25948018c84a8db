"""The GPU kernels of page scores: bounds of all pages, and the pages that score highest.

Scores are of one block of pages of one KV head per program; the choice is of one KV head per program. There
are two kernels, because the choice needs the scores of all programs of a head.
`kvjax.ops.decode.page_scores` defines the results.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kvjax.pallas_kernels.partial_gpu import NEG_INF, grid, product

BITS, SIGN, LEAST = 32, 31, -(2**31)


class Sizes(NamedTuple):
    """pages, queries, lanes: of one program, powers of two from 16; warps: for the compiler."""

    pages: int
    queries: int
    lanes: int
    warps: int


def _scores(counts: Any, layer: Any, q: Any, *refs: Any, sizes: Sizes) -> None:
    *summary, out = refs
    i = pl.program_id(0)
    page = pl.program_id(1) * sizes.pages + jnp.arange(sizes.pages)
    lane, live = jnp.arange(sizes.lanes), page < counts[i]
    wanted = live[:, None] & (lane < summary[0].shape[3])[None]
    rows = [plt.load(x.at[layer[0], i, *grid(page, lane)], mask=wanted, other=0) for x in summary]
    # Padding repeats the last query, which does not change a maximum over queries.
    at = grid(jnp.minimum(jnp.arange(sizes.queries), q.shape[1] - 1), lane)
    inside = jnp.broadcast_to((lane < q.shape[2])[None], at[0].shape)
    queries = plt.load(q.at[i, *at], mask=inside, other=0)
    kind = jnp.bfloat16 if queries.dtype == rows[0].dtype == jnp.bfloat16 else jnp.float32
    # max(q low, q high), channel by channel, as one product per sign of q.
    signed = [queries] if len(rows) == 1 else [jnp.minimum(queries, 0), jnp.maximum(queries, 0)]
    z = sum(product(x.astype(kind), y.astype(kind), 1) for x, y in zip(signed, rows, strict=True))
    best = jnp.where(live, jnp.asarray(z).max(0), NEG_INF)
    plt.store(out.at[i, page], best, mask=page < out.shape[1])


def page_scores(
    q: jax.Array, summary: tuple[jax.Array, ...], counts: jax.Array, layer: jax.Array, *, sizes: Sizes,
    interpret: bool = False,
) -> jax.Array:  # fmt: skip
    """Scores [I, P] of I KV heads; q [I, R, H]; summary [L, I, P, W] each, H <= W; counts [I]; layer [1]."""
    lists, pages = summary[0].shape[1:3]
    return pl.pallas_call(
        partial(_scores, sizes=sizes),
        grid=(lists, pl.cdiv(pages, sizes.pages)),
        out_shape=jax.ShapeDtypeStruct((lists, pages), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=sizes.warps, num_stages=1),
        interpret=interpret,
        name="page_scores",
    )(counts, layer, q, *summary)


def _best(scores: Any, counts: Any, out: Any, *, lanes: int) -> None:
    i, count = pl.program_id(0), counts[pl.program_id(0)]
    page = jnp.arange(lanes)
    there = page < scores.shape[1]
    bits = jax.lax.bitcast_convert_type(plt.load(scores.at[i, page], mask=there, other=NEG_INF), jnp.int32)
    # Integers in the order of the floats that have these bits.
    key = jnp.where(there, bits ^ (jax.lax.shift_right_arithmetic(bits, SIGN) & 0x7FFFFFFF), LEAST)

    def raised(step: Any, least: Any) -> Any:
        """Find the next bit of the largest key that `count` keys reach."""
        higher = least + jax.lax.shift_left(jnp.int32(1), SIGN - step)
        return jnp.where((key >= higher).astype(jnp.int32).sum() >= count, higher, least)

    least = jax.lax.fori_loop(0, BITS, raised, jnp.int32(LEAST))
    above, level = there & (key > least), there & (key == least)
    free = count - above.astype(jnp.int32).sum()
    chosen = above | (level & (jnp.cumsum(level.astype(jnp.int32)) <= free))
    # Pages that were not chosen follow, so every number of the result is written once, and is a page.
    before = jnp.cumsum(chosen.astype(jnp.int32))
    place = jnp.where(chosen, before - 1, count + page - before)
    plt.store(out.at[i, place], page, mask=there & (place < out.shape[1]))


def best_pages(scores: jax.Array, counts: jax.Array, *, most: int, interpret: bool = False) -> jax.Array:
    """Pages [I, M]: first those of the `counts` [I] highest of scores [I, P], ascending, then others."""
    lists, pages = scores.shape
    lanes = pl.next_power_of_2(pages)
    return pl.pallas_call(
        partial(_best, lanes=lanes),
        grid=(lists,),
        out_shape=jax.ShapeDtypeStruct((lists, most), jnp.int32),
        # Eight pages of a thread stay in registers.
        compiler_params=plt.CompilerParams(num_warps=min(32, max(1, lanes // 256)), num_stages=1),
        interpret=interpret,
        name="best_pages",
    )(scores, counts)
