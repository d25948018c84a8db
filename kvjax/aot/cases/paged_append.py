"""Appending to pages in place: alone, and with decoding in a scan over layers and in a generation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.aot.case import Case
from kvjax.aot.hardware import Device
from kvjax.ops.paged_append import paged_append
from kvjax.ops.paged_decode import PagePool, tpu_paged_decode

BATCH, HEADS, GROUP, LAYERS, WIDTH = 4, 8, 8, 32, 128
PAYLOADS: dict[str, tuple[Any, tuple[str, ...], int]] = {
    "bfloat16": (jnp.bfloat16, (), 128),
    "float32": (jnp.float32, (), 128),
    "int8": (jnp.int8, ("key_scale", "value_scale"), 128),
    "int4": (jnp.int4, ("key_scale", "value_scale"), 256),
}


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def pool_of(layers: int, pages: int, payload: str) -> PagePool:
    dtype, rows, page = PAYLOADS[payload]
    side = shape(layers, pages, len(rows), page, dtype=jnp.float32) if rows else None
    return PagePool(shape(layers, pages, 2, page, WIDTH, dtype=dtype), side, rows)


def nbytes(pool: PagePool) -> int:
    bits = 4 if pool.pages.dtype == jnp.int4 else jnp.dtype(pool.pages.dtype).itemsize * 8
    return pool.pages.size * bits // 8 + (0 if pool.rows is None else pool.rows.size * 4)


def append(device: Device, payload: str) -> Case:
    """32 rows of keys and values into one of two layers: what is moved is a tile each way for every row."""
    dtype, rows, _ = PAYLOADS[payload]
    pool, lists = pool_of(2, 2049, payload), BATCH * HEADS
    code = dtype if jnp.issubdtype(dtype, jnp.integer) else jnp.bfloat16
    operands = (
        pool, shape(BATCH, HEADS, 64, dtype=jnp.int32), shape(BATCH, HEADS, dtype=jnp.int32),
        shape(BATCH, HEADS, WIDTH, dtype=code), shape(BATCH, HEADS, WIDTH, dtype=code),
        {n: shape(BATCH, HEADS, dtype=jnp.float32) for n in rows}, shape(dtype=jnp.int32),
    )  # fmt: skip

    def run(pool: PagePool, table: Any, lengths: Any, k: Any, v: Any, rows: Any, layer: Any) -> PagePool:
        return paged_append(pool, table, lengths, k, v, layer, rows=rows, implementation="tpu")

    tiles = lists * (2 * 2 * 4096 + 2 * 4 * 128 * len(rows))
    return Case(
        run, operands, tiles, 0, nbytes(pool), "append",
        # One core does it, so what the probe splits over the cores is to stay whole.
        trips={"0": device.cores, "1": lists * device.cores}, donated=(0,),
    )  # fmt: skip


def steps(device: Device, payload: str, *, tokens: int = 1) -> Case:
    """Steps of 32 layers, each an append and a decode; the pool, of over 4 GB in bfloat16, is donated."""
    dtype, rows, page = PAYLOADS[payload]
    pages, most = 2049, 64
    pool, lists = pool_of(LAYERS, pages, payload), BATCH * HEADS
    code = dtype if jnp.issubdtype(dtype, jnp.integer) else jnp.bfloat16

    def layer(carry: Any, at: Any) -> Any:
        q, pool, table, lengths = carry
        new = q.reshape(BATCH, HEADS, GROUP, WIDTH)[:, :, 0].astype(code)
        side = {n: q[:, :HEADS, 0, 0].astype(jnp.float32) for n in rows}
        active = jnp.arange(BATCH) < BATCH - 1
        pool = paged_append(
            pool, table, lengths, new, new, at, rows=side, active=active, implementation="tpu"
        )
        out, _, _ = tpu_paged_decode(
            q, pool, table, lengths + 1, lengths[:, :1], at, scale=WIDTH**-0.5, window=None, softcap=None,
            mass=False, cores=device.cores,
        )  # fmt: skip
        return (out, pool, table, lengths), None

    def one(q: Any, pool: PagePool, table: Any, lengths: Any) -> Any:
        numbers = jnp.arange(LAYERS, dtype=jnp.int32)
        (q, pool, _, _), _ = jax.lax.scan(layer, (q, pool, table, lengths), numbers)
        return q, pool

    def run(q: Any, pool: PagePool, table: Any, lengths: Any) -> Any:
        def token(carry: Any, _: Any) -> Any:
            q, pool, lengths = carry
            q, pool = one(q, pool, table, lengths)
            return (q, pool, lengths + 1), q

        if tokens == 1:
            return one(q, pool, table, lengths)
        (_, pool, _), out = jax.lax.scan(token, (q, pool, lengths), None, length=tokens)
        return out, pool

    operands = (
        shape(BATCH, HEADS * GROUP, 1, WIDTH), pool, shape(BATCH, HEADS, most, dtype=jnp.int32),
        shape(BATCH, HEADS, dtype=jnp.int32),
    )  # fmt: skip
    kept, calls = nbytes(pool), tokens * LAYERS * device.cores
    flops = tokens * LAYERS * 4 * lists * GROUP * most * page * WIDTH
    return Case(
        run, operands, tokens * kept, flops, kept, "append",
        trips={"0": calls, "1": calls * lists}, profiles=False, donated=(1,),
    )  # fmt: skip


CASES: dict[str, Callable[[Device], Case]] = {
    **{f"paged_append-{n}": partial(append, payload=n) for n in PAYLOADS},
    **{f"paged_append-{n}-step": partial(steps, payload=n) for n in ("bfloat16", "int8")},
    **{f"paged_append-{n}-generation": partial(steps, payload=n, tokens=16) for n in ("bfloat16", "int8")},
}
