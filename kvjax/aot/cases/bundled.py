"""Jax's own paged decoding at the shape of ours, to stand beside it.

`paged_attention` has a table per sequence, `ragged_paged_attention` one too and all heads in a page. Their
loops run as long as the data says, which the compiler guesses at: the first is taken in its form with a grid
step per block, and both are counted with every path of a block, also those that run once: upper figures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from kvjax.aot.case import Case
from kvjax.aot.cases.paged_decode import BATCH, GROUP, HEADS
from kvjax.aot.hardware import Device

WIDTH, SLOTS = 128, 32768


def paged(device: Device, page: int = 128, step: int = 2048) -> Case:
    """`paged_attention` of `step` tokens per block."""
    pages = SLOTS // page
    pool = jax.ShapeDtypeStruct((HEADS, BATCH * pages, page, WIDTH), jnp.bfloat16)
    operands = (
        jax.ShapeDtypeStruct((BATCH, HEADS * GROUP, WIDTH), jnp.bfloat16), pool, pool,
        jax.ShapeDtypeStruct((BATCH,), jnp.int32), jax.ShapeDtypeStruct((BATCH, pages), jnp.int32),
    )  # fmt: skip
    mode = "kv_head" if device.cores == 2 else None
    run = partial(
        paged_attention, pages_per_compute_block=step // page, inline_seq_dim=False, megacore_mode=mode
    )
    trips = {"1": BATCH * HEADS * SLOTS // step}
    return Case(run, operands, *_work(), "paged_attention", trips, profiles=False)


def ragged(device: Device, page: int = 128, step: int = 2048) -> Case:
    """`ragged_paged_attention`: pages of all heads, `step` tokens of them per block."""
    pages = SLOTS // page
    operands = (
        jax.ShapeDtypeStruct((BATCH, HEADS * GROUP, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((BATCH * pages, page, 2 * HEADS, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((BATCH,), jnp.int32), jax.ShapeDtypeStruct((BATCH, pages), jnp.int32),
        jax.ShapeDtypeStruct((BATCH + 1,), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32),
    )  # fmt: skip
    tokens = step // HEADS
    run = partial(
        ragged_paged_attention, sm_scale=WIDTH**-0.5, num_kv_pages_per_block=tokens // page,
        num_queries_per_block=BATCH, vmem_limit_bytes=64 * 2**20,
    )  # fmt: skip
    # It runs on one core, also where there are two.
    blocks = device.cores * BATCH * SLOTS // tokens
    trips = {"1": BATCH, "2": blocks}
    return Case(run, operands, *_work(), "ragged_paged_attention_kernel", trips, profiles=False)


def _work() -> tuple[int, int, int]:
    """Bytes, operations and bytes of the cache: the same for both."""
    cache = 2 * 2 * BATCH * HEADS * SLOTS * WIDTH
    return cache + 2 * 2 * BATCH * HEADS * GROUP * WIDTH, 4 * BATCH * HEADS * GROUP * SLOTS * WIDTH, cache


CASES: dict[str, Callable[[Device], Case]] = {
    "jax_paged_attention-bfloat16-h128": paged,
    "jax_ragged_paged_attention-bfloat16-h128": partial(ragged, step=4096),
}
