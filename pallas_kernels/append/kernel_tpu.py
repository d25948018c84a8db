"""The TPU kernel that writes one slot per KV head in place: tiles are read, changed and written back.

`kvjax.ops.decode.append` defines the result.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas_kernels.append.tiles import rewrite


def _kernel(block: Any, slot: Any, *refs: Any, tiles: tuple[int, ...]) -> None:
    many = len(tiles)
    new, pools, buffers = refs[:many], refs[2 * many : 3 * many], refs[3 * many : 4 * many]
    come, gone = refs[4 * many :]
    chunk = buffers[0].shape[0]
    first = pl.program_id(0) * chunk

    def places(n: Any) -> list[tuple[Any, Any]]:
        def tile(pool: Any, rows: int) -> Any:
            at = pl.multiple_of(slot[first + n] // rows * rows, rows)
            return pool.at[block[first + n], :, pl.ds(at, rows)]

        each = zip(pools, tiles, buffers, strict=True)
        return [(tile(pool, rows), buffer.at[n]) for pool, rows, buffer in each]

    def change(n: Any) -> None:
        for x, buffer, rows in zip(new, buffers, tiles, strict=True):
            old = buffer[n]
            here = jax.lax.broadcasted_iota(jnp.int32, old.shape, 1) == jax.lax.rem(slot[first + n], rows)
            # Through float32, which holds every payload exactly: half of them have no select instruction.
            wide = jnp.where(here, x[n].astype(jnp.float32), old.astype(jnp.float32))
            buffer[n] = wide.astype(old.dtype)

    rewrite(chunk, lambda n: slot[first + n] >= 0, places, change, (come, gone))


def append(
    pools: list[jax.Array],
    new: list[jax.Array],
    block: jax.Array,
    slot: jax.Array,
    *,
    tiles: tuple[int, ...],
    chunk: int,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Return the pools, updated in place: new[i] at pools[block[i], :, slot[i]]; slot[i] < 0 writes nothing.

    pools: [X, A, S, W] or [X, C, S]; new: [I, A, 1, W] or [I, C, 1]. tiles: how many slots each copy of a
    pool has. chunk: entries per grid step, a divisor of I.
    """
    lists, many = block.shape[0], len(pools)

    def of(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((chunk, *x.shape[1:]), lambda c, *_: (c, *(0,) * (x.ndim - 1)))

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    made = pl.pallas_call(
        partial(_kernel, tiles=tiles),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(lists // chunk,),
            in_specs=[*map(of, new), *[anywhere] * many],
            out_specs=[anywhere] * many,
            scratch_shapes=[
                *(
                    pltpu.VMEM((chunk, x.shape[1], rows, *x.shape[3:]), x.dtype)
                    for x, rows in zip(pools, tiles, strict=True)
                ),
                pltpu.SemaphoreType.DMA((chunk,)),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        input_output_aliases={2 + many + i: i for i in range(many)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=True, has_side_effects=True
        ),
        interpret=interpret,
        name="append",
    )(block, slot, *new, *pools)
    return tuple(made)
