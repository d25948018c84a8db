"""The TPU kernel of page scores: the summaries of many pages against the queries of one KV head.

The grid is (KV heads, blocks of pages). Blocks after a head's last page are neither fetched nor computed.
`kvjax.ops.decode.page_scores` defines the result.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
NEG_INF = float("-inf")


def _kernel(_: Any, counts: Any, q: Any, *refs: Any) -> None:
    *summary, out = refs
    live = counts[pl.program_id(0)] - pl.program_id(1) * out.shape[2]

    @pl.when(live > 0)
    def _() -> None:
        if len(summary) == 1:
            z = _products(q[0], summary[0][0, 0])
        else:
            # max(q low, q high), channel by channel, as one product per sign of q.
            low, high = summary
            z = _products(jnp.maximum(q[0], 0), high[0, 0]) + _products(jnp.minimum(q[0], 0), low[0, 0])
        page = jax.lax.broadcasted_iota(jnp.int32, (1, z.shape[1]), 1)
        out[0] = jnp.where(page < live, z.max(0, keepdims=True), NEG_INF)

    @pl.when(live <= 0)
    def _() -> None:
        out[...] = jnp.full_like(out, NEG_INF)


def _products(rows: Any, pages: Any) -> Any:
    """Inner products of rows of q and of pages, [R, pages]; a NaN in a page reaches its own column alone."""
    kind = jnp.float32 if jnp.float32 in (rows.dtype, pages.dtype) else jnp.bfloat16
    return jax.lax.dot_general(
        rows.astype(kind), pages.astype(kind), (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=jax.lax.Precision.HIGHEST if kind == jnp.float32 else None,
    )  # fmt: skip


def page_scores(
    q: jax.Array, summary: tuple[jax.Array, ...], counts: jax.Array, layer: jax.Array, *, pages: int,
    interpret: Any = False,
) -> jax.Array:  # fmt: skip
    """Compute the largest score of each page over q's rows, [I, 1, P] float32; -inf after a head's count.

    q [I, R, W] with R a multiple of 8 and W of 128; summary: (centroid,) or (low, high), each [L, I, P, W];
    counts [I]; layer [1]; pages: per step, a multiple of 128.
    """
    lists, rows, width = q.shape
    total = summary[0].shape[2]

    def at(i: Any, j: Any, layer: Any, counts: Any) -> tuple[Any, Any, Any, int]:
        return layer[0], i, jnp.minimum(j, jnp.maximum(pl.cdiv(counts[i], pages) - 1, 0)), 0

    return pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct((lists, 1, total), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(lists, pl.cdiv(total, pages)),
            in_specs=[
                pl.BlockSpec((1, rows, width), lambda i, j, *_: (i, 0, 0)),
                *[pl.BlockSpec((1, 1, pages, width), at) for _ in summary],
            ],
            out_specs=pl.BlockSpec((1, 1, pages), lambda i, j, *_: (i, 0, j)),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="page_scores",
    )(layer, counts, q, *summary)
