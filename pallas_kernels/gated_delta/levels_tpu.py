"""The TPU kernel of one token over the levels of log-linear attention: only non-empty levels are visited.

A row visits its levels from the lowest up. Those below its target are summed on the way and emptied, the
target takes the sum; all decay and are erased, and level 0 is written. In place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .decode_tpu import advance, columns_of


def _kernel(_: Any, visits: Any, counts: Any, targets: Any, *refs: Any, erases: bool) -> None:
    q, k, v, g, *p, scales, levels, out, new, gathered = refs
    row, at = pl.program_id(0), pl.program_id(2)
    level, target = visits[row, at], targets[row]

    @pl.when(at == 0)
    def _() -> None:
        out[...] = jnp.zeros_like(out)
        gathered[...] = jnp.zeros_like(gathered)

    @pl.when(at < counts[row])
    def _() -> None:
        columns = columns_of(q[0], k[0], g[0], p[0][0] if erases else None)
        for n in range(v.shape[1]):
            found = levels[0, 0, 0, n]
            whole = jnp.where(level < target, 0.0, found + jnp.where(level == target, gathered[n], 0.0))
            gathered[n] += found
            written = jnp.where(level == 0, v[0, n : n + 1].astype(jnp.float32), 0.0)
            o, new[0, 0, 0, n] = advance(whole, written, columns, n)
            out[0, n : n + 1] += scales[0, 0, n : n + 1] * o


def decode_levels(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, p: jax.Array | None, scales: jax.Array,
    levels: jax.Array, layer: jax.Array, visits: jax.Array, counts: jax.Array, targets: jax.Array, *,
    together: int, interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(o [B, H, V] float32, the levels [Lg, B, L, H, K, V] of all layers, updated in place).

    q, k, g, p [B, H, K], v [B, H, V], scales [B, L, H, 1]; layer [1]: the one that changes. visits [B, L]: a
    row's levels in ascending order, the last one repeated after counts [B]; targets [B]: the level that takes
    its lower levels. together: heads per grid step, a multiple of 8 or all.
    """
    _, rows, count, heads, keys, values = levels.shape
    given = [x for x in (q, k, v, g, p) if x is not None]

    def row(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, together, x.shape[2]), lambda b, h, j, *_: (b, h, 0))

    at = lambda b, h, j, layer, visits, *_: (b, visits[b, j], h, 0)  # noqa: E731
    level = pl.BlockSpec((1, 1, 1, together, keys, values), lambda *i: (i[3][0], *at(*i), 0))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=(rows, heads // together, count),
        in_specs=[*map(row, given), pl.BlockSpec((1, 1, together, 1), at), level],
        out_specs=[row(v), level],
        scratch_shapes=[pltpu.VMEM((together, keys, values), jnp.float32)],
    )
    return pl.pallas_call(
        partial(_kernel, erases=p is not None),
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, jnp.float32), jax.ShapeDtypeStruct(levels.shape, levels.dtype)
        ],
        grid_spec=grid,
        input_output_aliases={4 + len(given) + 1: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="log_linear_step",
    )(layer, visits, counts, targets, *given, scales, levels)  # fmt: skip
