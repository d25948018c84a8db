"""Decoding over dense codes with scales of groups, as KIVI keeps them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.aot.case import Case
from kvjax.aot.hardware import Device
from kvjax.ops.decode.grouped_decode import Grouped, slots_per_step, tpu_grouped_decode

BATCH, HEADS, GROUP, SLOTS = 4, 8, 8, 32768


def grouped_decode(
    device: Device, *, bits: int, width: int = 128, group: int = 32, block: int | None = None
) -> Case:
    """KV heads of 32768 slots, all in use, B = 4, K = 8, G = 8, two layers."""
    lists = BATCH * HEADS

    def words(rows: int) -> Any:
        return jax.ShapeDtypeStruct((2, BATCH, HEADS, rows, width), jnp.uint32)

    cache = Grouped(words(SLOTS * bits // 32), words(SLOTS // group))
    operands = (
        jax.ShapeDtypeStruct((BATCH, HEADS * GROUP, 1, width), jnp.bfloat16), cache, cache,
        jax.ShapeDtypeStruct((BATCH, HEADS), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32),
    )  # fmt: skip
    block = block or slots_per_step(bits, width, device.generation)

    def run(q: Any, k: Any, v: Any, lengths: Any, layer: Any) -> Any:
        return tpu_grouped_decode(
            q,
            k,
            v,
            lengths,
            layer,
            bits=bits,
            group=group,
            scale=width**-0.5,
            block=block,
            cores=device.cores,
        )

    held = 2 * sum(x.size * 4 for x in cache)
    moved = held // 2 + 2 * lists * GROUP * width * 2
    return Case(
        run, operands, moved, 4 * lists * GROUP * SLOTS * width, held, "grouped_decode",
        trips={"1": lists, "2": lists * SLOTS // block}, profiles=False,
    )  # fmt: skip


CASES: dict[str, Callable[[Device], Case]] = {
    "grouped_decode-uint2-h128": partial(grouped_decode, bits=2),
    "grouped_decode-uint4-h128": partial(grouped_decode, bits=4),
    "grouped_decode-uint4-h128-group64": partial(grouped_decode, bits=4, group=64),
    "grouped_decode-uint2-h256": partial(grouped_decode, bits=2, width=256),
}
