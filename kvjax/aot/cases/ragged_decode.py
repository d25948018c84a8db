"""Decoding over KV heads of different lengths, concatenated, as per-head budgets need; here all are full."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.aot.case import Case
from kvjax.aot.hardware import Device
from kvjax.ops.decode.ragged_decode import tpu_ragged_decode
from kvjax.ops.decode.stacked_decode import slots_per_step

BATCH, HEADS, GROUP, SLOTS = 4, 8, 4, 8192


def ragged_decode(device: Device, dtype: Any = jnp.bfloat16, *, page: int = 128, bias: bool = False) -> Case:
    """KV heads of 8192 slots that begin at multiples of `page`: B = 4, K = 8, G = 4, H = 128."""
    lists, width, item = BATCH * HEADS, 128, jnp.dtype(dtype).itemsize
    rows = jax.ShapeDtypeStruct((lists * SLOTS, width), dtype)
    numbers = jax.ShapeDtypeStruct((BATCH, HEADS), jnp.int32)
    operands = (
        jax.ShapeDtypeStruct((BATCH, HEADS * GROUP, 1, width), dtype), rows, rows, numbers, numbers,
        jax.ShapeDtypeStruct((BATCH, HEADS, SLOTS), jnp.float32) if bias else None,
    )  # fmt: skip

    def run(q: Any, k: Any, v: Any, starts: Any, lengths: Any, bias: Any) -> Any:
        return tpu_ragged_decode(
            q, k, v, starts, lengths, most=SLOTS, aligned=page, scale=width**-0.5, values=width, bias=bias,
            cores=device.cores,
        )  # fmt: skip

    cache = 2 * rows.size * item
    moved = cache + lists * SLOTS * 4 * bias + 2 * lists * GROUP * width * item
    block = slots_per_step(rows, rows, generation=device.generation)
    return Case(
        run, operands, moved, 4 * lists * GROUP * SLOTS * width, cache, "stacked_decode",
        trips={"1": lists, "2": lists * SLOTS // block}, profiles=False,
    )  # fmt: skip


CASES: dict[str, Callable[[Device], Case]] = {
    "ragged_decode-bfloat16-h128": ragged_decode,
    "ragged_decode-bfloat16-h128-page16": partial(ragged_decode, page=16),
    "ragged_decode-bfloat16-h128-bias": partial(ragged_decode, bias=True),
    "ragged_decode-float32-h128": partial(ragged_decode, dtype=jnp.float32),
}
