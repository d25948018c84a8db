"""Prefill attention: a prompt over itself, or a chunk of a prompt over a cache.

The conditional parts of a kernel are counted by how many blocks a causal mask hides, cuts or shows whole. The
compiler's simulation does not know these counts, so it has no figure for this kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.aot.case import Case
from kvjax.aot.hardware import Device
from kvjax.ops.attention.flash_prefill import FlashBlocks, default_blocks, slots_in_vmem, tpu_flash_prefill

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
    blocks: FlashBlocks | None = None,
) -> Case:
    """Let `tokens` last tokens attend to `slots` slots, mostly a cache. B = 1, K = 8; gradients if `back`."""
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
    cache = bits * kv if tokens < slots else 0
    whole, cut = causal_blocks(*blocks[2 * back :][:2], tokens, slots)  # pyright: ignore[reportCallIssue]
    runs = (HEADS * rows, HEADS * whole, HEADS * cut, HEADS * rows)
    steps = HEADS * rows * -(-slots // blocks[2 * back + 1])
    if not back:
        operands = (q, k, v, *places)
        return Case(
            run, operands, bits * (2 * numbers + kv), 2 * product, cache, "flash_prefill",
            trips={"1": steps}, branches=runs, profiles=False,
        )  # fmt: skip
    parts = -(-slots // slots_in_vmem(blocks.back_kv, width, width))
    runs = (HEADS * parts, HEADS * rows * parts, *runs[1:3], HEADS * rows * parts, HEADS * parts)
    cotangents = (q, jax.ShapeDtypeStruct(q.shape[:3], jnp.float32))
    # Every part reads and writes float32 sums of the queries' gradient.
    moved = bits * (2 * parts * numbers + 2 * kv) + 8 * parts * numbers
    return Case(
        gradients, (q, k, v, *places, *cotangents), moved, 5 * product, cache, "flash_prefill_back",
        trips={"1": steps}, branches=runs, profiles=False,
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
    return cases


CASES = _registry()
