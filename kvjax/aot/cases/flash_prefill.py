"""Prefill attention: a prompt over itself, and jax's bundled splash attention on the same shape beside it.

The conditional parts of a kernel are counted by how many blocks a causal mask leaves unseen, cuts or lets
through whole. The compiler's simulation knows nothing of that: it has no figure for ours, and one below the
matrix units' least time for splash.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.aot.case import Case
from kvjax.aot.hardware import Device
from kvjax.ops.flash_prefill import Blocks, default_blocks, slots_in_vmem, tpu_flash_prefill

TOKENS, HEADS = 8192, 8


def causal_blocks(q: int, kv: int, tokens: int, slots: int) -> tuple[int, int]:
    """Pairs of blocks that are seen whole and in part, by the last `tokens` of `slots`.

    >>> causal_blocks(128, 128, 256, 256)
    (1, 2)
    """
    firsts = range(slots - tokens, slots, q)
    whole = sum((first + 1) // kv for first in firsts)
    return whole, sum(-(-(first + q) // kv) for first in firsts) - whole


def shapes(tokens: int, slots: int, group: int, width: int, dtype: Any) -> tuple[Any, ...]:
    kv = jax.ShapeDtypeStruct((1, HEADS, slots, width), dtype)
    q = jax.ShapeDtypeStruct((1, HEADS * group, tokens, width), dtype)
    return q, kv, kv


def counts(tokens: int, slots: int, group: int, width: int) -> tuple[int, int]:
    """(operations of one product of all visible pairs, numbers in queries)."""
    pairs = tokens * slots - tokens * (tokens - 1) // 2
    return 2 * HEADS * group * width * pairs, HEADS * group * tokens * width


def flash_prefill(
    device: Device,
    *,
    tokens: int = TOKENS,
    slots: int = TOKENS,
    group: int = 4,
    width: int = 128,
    dtype: Any = jnp.bfloat16,
    back: bool = False,
    blocks: Blocks | None = None,
) -> Case:
    """The last `tokens` of `slots`, B = 1, K = 8; the gradients alone where `back`."""
    q, k, v = shapes(tokens, slots, group, width, dtype)
    blocks = blocks or default_blocks(q, k, v)
    how: dict[str, Any] = dict(scale=width**-0.5, window=None, softcap=None, blocks=blocks)
    places = (jax.ShapeDtypeStruct((1, tokens), jnp.int32), jax.ShapeDtypeStruct((1, 1, slots), jnp.int32))

    def run(q: Any, k: Any, v: Any, q_pos: Any, k_pos: Any) -> Any:
        return tpu_flash_prefill(q, k, v, q_pos, k_pos, None, None, **how)

    def gradients(q: Any, k: Any, v: Any, q_pos: Any, k_pos: Any, *cotangents: Any) -> Any:
        return jax.vjp(lambda *x: run(*x, q_pos, k_pos), q, k, v)[1](cotangents)  # pyright: ignore[reportCallIssue]

    product, numbers = counts(tokens, slots, group, width)
    bits = jnp.dtype(dtype).itemsize
    kv, rows = 2 * HEADS * slots * width, tokens // blocks[2 * back]
    whole, cut = causal_blocks(*blocks[2 * back :][:2], tokens, slots)  # pyright: ignore[reportCallIssue]
    runs = (HEADS * rows, HEADS * whole, HEADS * cut, HEADS * rows)
    steps = HEADS * rows * -(-slots // blocks[2 * back + 1])
    if not back:
        operands = (q, k, v, *places)
        return Case(
            run, operands, bits * (2 * numbers + kv), 2 * product, bits * kv, "flash_prefill",
            trips={"1": steps}, branches=runs, profiles=False,
        )  # fmt: skip
    parts = -(-slots // slots_in_vmem(blocks.back_kv, width, width))
    runs = (HEADS * parts, HEADS * rows * parts, *runs[1:3], HEADS * rows * parts, HEADS * parts)
    cotangents = (q, jax.ShapeDtypeStruct(q.shape[:3], jnp.float32))
    # Of the queries' gradient every part reads and writes sums in float32.
    moved = bits * (2 * parts * numbers + 2 * kv) + 8 * parts * numbers
    return Case(
        gradients, (q, k, v, *places, *cotangents), moved, 5 * product, bits * kv, "flash_prefill_back",
        trips={"1": steps}, branches=runs, profiles=False,
    )  # fmt: skip


def splash(device: Device, *, back: bool = False, block: int = 1024, compute: int = 512) -> Case:
    """jax.experimental.pallas.ops.tpu.splash_attention, causal, B = 1, N = 32, K = 8, H = 128.

    Its gradients' own kernel where `back`; the sum over the queries' gradients of all blocks of slots, which
    it leaves to XLA, is in the bytes alone.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    group, width = 4, 128
    operands = shapes(TOKENS, TOKENS, group, width, jnp.bfloat16)
    heads = HEADS * group
    sizes = kernel.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=compute, block_q_dkv=block, block_kv_dkv=block,
        block_kv_dkv_compute=compute, use_fused_bwd_kernel=True,
    )  # fmt: skip
    mask = masks.MultiHeadMask([masks.CausalMask((TOKENS, TOKENS)) for _ in range(heads)])
    attend = jax.vmap(kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes))
    product, numbers = counts(TOKENS, TOKENS, group, width)
    rows, kv = TOKENS // block, 2 * HEADS * TOKENS * width
    seen, once = heads * sum(causal_blocks(block, block, TOKENS, TOKENS)), heads * rows
    trips, runs = {"1": heads * rows**2}, (once, seen, once)
    if not back:
        return Case(
            lambda q, k, v: attend(q * jnp.asarray(width**-0.5, q.dtype), k, v), operands,
            2 * (2 * numbers + kv), 2 * product, 2 * kv, "splash_mha_fwd",
            trips=trips, branches=runs, profiles=False,
        )  # fmt: skip

    def gradients(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        return jax.vjp(attend, q, k, v)[1](d_out)

    # It does not split its axes over cores.
    trips, runs = {"1": trips["1"] * device.cores}, tuple(n * device.cores for n in runs)
    return Case(
        gradients, (*operands, operands[0]), 2 * (3 * numbers + 2 * rows * numbers + 2 * kv), 5 * product,
        2 * kv, "splash_mha_dkv", trips=trips, branches=runs, profiles=False,
    )  # fmt: skip


def _registry() -> dict[str, Callable[[Device], Case]]:
    shapes: dict[str, dict[str, Any]] = {
        "bfloat16-h128": {},
        "bfloat16-h256": dict(width=256),
        "float32-h128": dict(dtype=jnp.float32, tokens=4096, slots=4096),
        "bfloat16-h128-group1": dict(group=1),
        "bfloat16-h128-group16": dict(group=16),
    }
    cases: dict[str, Callable[[Device], Case]] = {}
    for name, options in shapes.items():
        cases[f"flash_prefill-{name}"] = partial(flash_prefill, **options)
        cases[f"flash_prefill-{name}-back"] = partial(flash_prefill, back=True, **options)
    cases["flash_prefill-bfloat16-h128-chunk"] = partial(flash_prefill, tokens=1024, slots=32768)
    cases["splash-bfloat16-h128"] = splash
    cases["splash-bfloat16-h128-back"] = partial(splash, back=True)
    return cases


CASES = _registry()
