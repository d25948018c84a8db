"""Decoding over selected pages of the dense cache of all layers, as Quest does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.aot.case import Case
from kvjax.aot.hardware import Device
from kvjax.ops.decode.picked_decode import tpu_picked_decode
from kvjax.ops.decode.stacked_decode import slots_per_step

BATCH, HEADS, GROUP, LAYERS, SLOTS, WIDTH = 4, 8, 4, 4, 32768, 128


def picked_decode(device: Device, *, page: int, slots: int) -> Case:
    """One layer of four, `slots` out of 32768 of every KV head: B = 4, K = 8, G = 4, H = 128, bfloat16."""
    lists, most = BATCH * HEADS, slots // page
    cache = jax.ShapeDtypeStruct((LAYERS, BATCH, HEADS, SLOTS, WIDTH), jnp.bfloat16)

    def numbers(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    operands = (
        jax.ShapeDtypeStruct((BATCH, HEADS * GROUP, 1, WIDTH), jnp.bfloat16), cache, cache,
        numbers(BATCH, HEADS, most), numbers(BATCH, HEADS), numbers(BATCH, HEADS, slots), numbers(BATCH, 1),
        numbers(),
    )  # fmt: skip
    run = partial(
        tpu_picked_decode, page=page, scale=WIDTH**-0.5, window=None, softcap=None, cores=device.cores
    )
    moved = 2 * lists * (slots + GROUP) * WIDTH * 2 + 4 * lists * slots
    block = min(slots_per_step(cache, cache, generation=device.generation), slots)
    # The copies for a core's first KV head are written out before the loop, and run once.
    return Case(
        run, operands, moved, 4 * lists * GROUP * slots * WIDTH, 2 * cache.size * 2, "stacked_decode",
        trips={"1": lists, "2": lists * slots // block}, profiles=False, branches=(device.cores,),
    )  # fmt: skip


CASES: dict[str, Callable[[Device], Case]] = {
    "picked_decode-bfloat16-h128-page16": partial(picked_decode, page=16, slots=1024),
    "picked_decode-bfloat16-h128-page64": partial(picked_decode, page=64, slots=4096),
}
