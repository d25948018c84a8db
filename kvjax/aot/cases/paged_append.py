"""Appending to pages in place: alone, with decoding in a scan over layers, and in a generation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.aot.case import Case
from kvjax.aot.hardware import Device
from kvjax.ops.decode.page_pool import PagePool, page_rows
from kvjax.ops.decode.paged_append import paged_append
from kvjax.ops.decode.paged_decode import tpu_paged_decode

BATCH, HEADS, GROUP, LAYERS, WIDTH = 4, 8, 8, 32, 128
SCALES = ("key_scale", "value_scale")
PAYLOADS: dict[str, tuple[Any, tuple[str, ...], int]] = {
    "bfloat16": (jnp.bfloat16, (), 128),
    "int8": (jnp.int8, SCALES, 256),
}


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def pool_of(layers: int, pages: int, payload: str) -> PagePool:
    dtype, names, page = PAYLOADS[payload]
    stored = jnp.dtype(dtype).name
    rows = page_rows(stored, page, WIDTH, names)
    return PagePool(shape(layers, pages, rows, WIDTH, dtype=jnp.int32), page, stored, names)


def steps(device: Device, payload: str, *, tokens: int = 1) -> Case:
    """Run steps of 32 layers, each an append and a decode; the pool, of over 4 GB in bfloat16, is donated."""
    dtype, rows, page = PAYLOADS[payload]
    pages, most = 2049, 64
    pool, lists = pool_of(LAYERS, pages, payload), BATCH * HEADS

    def layer(carry: Any, at: Any) -> Any:
        q, pool, table, lengths = carry
        new = q.reshape(BATCH, HEADS, GROUP, WIDTH)[:, :, 0].astype(dtype)
        side = {n: q[:, :HEADS, 0, 0].astype(jnp.float32) for n in rows}
        active = jnp.arange(BATCH) < BATCH - 1
        pool = paged_append(pool, table, lengths, new, new, at, numbers=side, active=active)
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
    kept, calls = 4 * pool.words.size, tokens * LAYERS * device.cores
    flops = tokens * LAYERS * 4 * lists * GROUP * most * page * WIDTH
    return Case(
        run, operands, tokens * kept, flops, kept, "paged_decode",
        trips={"1": calls * lists}, profiles=False, donated=(1,),
    )  # fmt: skip


def alone(device: Device, payload: str) -> Case:
    """Append one token of every KV head to one layer, and write nothing else."""
    dtype, rows, page = PAYLOADS[payload]
    pool, lists = pool_of(LAYERS, 2049, payload), BATCH * HEADS

    def run(k: Any, v: Any, side: Any, pool: PagePool, table: Any, lengths: Any, layer: Any) -> Any:
        return paged_append(pool, table, lengths, k, v, layer, numbers=side, active=lengths[:, 0] >= 0)

    new = shape(BATCH, HEADS, WIDTH, dtype=dtype)
    operands = (
        new, new, {n: shape(BATCH, HEADS, dtype=jnp.float32) for n in rows}, pool,
        shape(BATCH, HEADS, 64, dtype=jnp.int32), shape(BATCH, HEADS, dtype=jnp.int32),
        shape(dtype=jnp.int32),
    )  # fmt: skip
    # A tile of keys, one of values and one of numbers, there and back.
    moved = 2 * lists * (2 + bool(rows)) * 8 * WIDTH * 4
    trips = {"1": lists // 2 * device.cores}
    return Case(run, operands, moved, 0, 4 * pool.words.size, "paged_append", trips, donated=(3,))


CASES: dict[str, Callable[[Device], Case]] = {
    **{f"paged_append-{n}-alone": partial(alone, payload=n) for n in ("bfloat16", "int8")},
    **{f"paged_append-{n}-step": partial(steps, payload=n) for n in ("bfloat16", "int8")},
    **{f"paged_append-{n}-generation": partial(steps, payload=n, tokens=16) for n in ("bfloat16", "int8")},
}
