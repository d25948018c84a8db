"""Jax's own kernels at the shapes of ours, for comparison: paged decoding, and prompts.

No test checks these kernels' figures. Both decoding kernels have one page table per sequence; pages of
`ragged_paged_attention` hold all heads. Their loops' trip counts depend on data, which the compiler can only
guess. So `paged_attention` is used in its form with a grid step per block, and both are counted as if every
block ran all code, even what runs once: their figures are upper bounds. The simulation's figure for splash
attention is unreliable: it is less than the matrix units need.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from kvjax.aot.case import Case
from kvjax.aot.cases.flash_prefill import TOKENS, causal_blocks, counts, shapes
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
    """`ragged_paged_attention`: pages of all heads, `step` of their tokens per block."""
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
    # It runs on one core, even if there are two.
    blocks = device.cores * BATCH * SLOTS // tokens
    trips = {"1": BATCH, "2": blocks}
    return Case(run, operands, *_work(), "ragged_paged_attention_kernel", trips, profiles=False)


def _work() -> tuple[int, int, int]:
    """Bytes, operations and bytes of the cache: the same for both."""
    cache = 2 * 2 * BATCH * HEADS * SLOTS * WIDTH
    return cache + 2 * 2 * BATCH * HEADS * GROUP * WIDTH, 4 * BATCH * HEADS * GROUP * SLOTS * WIDTH, cache


def splash(device: Device, *, back: bool = False, block: int = 1024, compute: int = 512) -> Case:
    """Splash attention over a prompt of 8192 tokens, causal, B = 1, N = 32, K = 8, H = 128.

    back: its own kernel for gradients; XLA then sums the queries' gradients over all blocks of slots, which
    is counted in the bytes alone.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    group = 4
    operands = shapes(TOKENS, TOKENS, group, WIDTH, jnp.bfloat16)
    heads = HEADS * group
    sizes = kernel.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=compute, block_q_dkv=block, block_kv_dkv=block,
        block_kv_dkv_compute=compute, use_fused_bwd_kernel=True,
    )  # fmt: skip
    mask = masks.MultiHeadMask([masks.CausalMask((TOKENS, TOKENS)) for _ in range(heads)])
    attend = jax.vmap(kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes))
    product, numbers = counts(TOKENS, TOKENS, group, WIDTH)
    rows, kv = TOKENS // block, 2 * HEADS * TOKENS * WIDTH
    seen, once = heads * sum(causal_blocks(block, block, TOKENS, TOKENS)), heads * rows
    trips, runs = {"1": heads * rows**2}, (once, seen, once)
    if not back:
        return Case(
            lambda q, k, v: attend(q * jnp.asarray(WIDTH**-0.5, q.dtype), k, v), operands,
            2 * (2 * numbers + kv), 2 * product, 0, "splash_mha_fwd",
            trips=trips, branches=runs, profiles=False,
        )  # fmt: skip

    def gradients(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        return jax.vjp(attend, q, k, v)[1](d_out)

    # It does not split its axes over cores.
    trips, runs = {"1": trips["1"] * device.cores}, tuple(n * device.cores for n in runs)
    return Case(
        gradients, (*operands, operands[0]), 2 * (3 * numbers + 2 * rows * numbers + 2 * kv), 5 * product,
        0, "splash_mha_dkv", trips=trips, branches=runs, profiles=False,
    )  # fmt: skip


CASES: dict[str, Callable[[Device], Case]] = {
    "jax_paged_attention-bfloat16-h128": paged,
    "jax_ragged_paged_attention-bfloat16-h128": partial(ragged, step=4096),
    "splash-bfloat16-h128": splash,
    "splash-bfloat16-h128-back": partial(splash, back=True),
}
