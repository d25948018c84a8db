"""Appends one new slot per KV head to an array in place: the basis of every append."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.ops.base.dispatch import form
from kvjax.ops.base.row_scatter import scatter_rows
from kvjax.pallas_kernels.append import kernel_tpu as tpu

LANES, SUBLANES, CHUNK = 128, 8, 64


def append(
    pools: Sequence[Array],
    new: Sequence[Array],
    block: Int[Array, " I"],
    slot: Int[Array, " I"],
    *,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Write new[i] into the pools at [block[i], :, slot[i]], in place if they are donated.

    pools are [X, A, S, W] (rows) or [X, C, S] (numbers), new [I, A, W] or [I, C]. An entry with a negative
    slot writes nothing. No two entries of a call may name the same block.

    implementation: "reference", a scatter, "tpu" or "tpu interpret"; None takes the kernel if it can run.
    Raises NotImplementedError if a forced one cannot.

    >>> x, = append([jnp.zeros((2, 1, 4, 1))], [jnp.ones((1, 1, 1))], jnp.asarray([1]), jnp.asarray([2]))
    >>> x.ravel().tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    """
    why = next(filter(None, map(refusal, pools)), "")
    chosen = form("append", implementation, pools, new, tpu=why)
    block, slot = block.astype(jnp.int32), slot.astype(jnp.int32)
    if chosen == "reference":
        return tuple(_scatter(x, y.astype(x.dtype), block, slot) for x, y in zip(pools, new, strict=True))
    return tpu_append(pools, new, block, slot, interpret=chosen != "tpu")


def refusal(pool: Array) -> str:
    """Why the TPU kernel cannot write into `pool`; empty if it can."""
    if pool.ndim == 4 and pool.shape[-1] % LANES:
        return f"rows are {pool.shape[-1]} wide, expected a multiple of {LANES}"
    if pool.shape[2] % tile(pool):
        return f"blocks of {pool.shape[2]} slots of {pool.dtype}, expected a multiple of {tile(pool)}"
    return ""


def tile(pool: Array) -> int:
    """How many slots of `pool` share a memory tile."""
    if pool.ndim == 3:
        return LANES
    return SUBLANES * 32 // (4 if pool.dtype == jnp.int4 else 8 * jnp.dtype(pool.dtype).itemsize)


def _scatter(pool: Array, new: Array, block: Array, slot: Array) -> Array:
    """Scatter with one flat index: with several axes XLA would choose another layout, and copy."""
    many, count, slots = pool.shape[1], pool.shape[0] * pool.shape[1] * pool.shape[2], pool.shape[2]
    lists = block.shape[0]
    side = jnp.arange(many, dtype=jnp.int32)[None]
    at = (block[:, None] * many + side) * slots + slot[:, None]
    # Entries that write nothing get distinct indices after the end, because indices must be unique.
    nowhere = count + jnp.arange(lists * many, dtype=jnp.int32).reshape(lists, many)
    at = jnp.where(slot[:, None] >= 0, at, nowhere).reshape(-1)
    flat = pool.reshape(count, *pool.shape[3:])
    rows = new.reshape(lists * many, *pool.shape[3:])
    return scatter_rows(flat, at, rows, unique=True).reshape(pool.shape)


def tpu_append(
    pools: Sequence[Array], new: Sequence[Array], block: Array, slot: Array, *, interpret: Any = False
) -> tuple[Array, ...]:
    """Run the kernel on the operands of `append`."""
    lists = block.shape[0]
    chunk = min(lists, CHUNK)
    more = -lists % chunk
    rows = [y.astype(x.dtype)[:, :, None] for x, y in zip(pools, new, strict=True)]
    rows = [jnp.pad(y, ((0, more), *((0, 0),) * (y.ndim - 1))) for y in rows]
    block, slot = jnp.pad(block, (0, more)), jnp.pad(slot, (0, more), constant_values=-1)
    tiles = tuple(map(tile, pools))
    return tpu.append(list(pools), rows, block, slot, tiles=tiles, chunk=chunk, interpret=interpret)
