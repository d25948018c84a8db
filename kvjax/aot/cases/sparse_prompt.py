"""Sparse prompts: queries of a prompt over a fifth of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.aot.case import Case
from kvjax.aot.hardware import Device
from kvjax.ops.attention.sparse_prompt import Options, tpu_sparse_prompt

TOKENS, HEADS, SHARE = 8192, 8, 0.2


def sparse_prompt(
    device: Device, *, segment: int, block: int, each: bool = False, group: int = 4, width: int = 128,
    dtype: Any = jnp.bfloat16,
) -> Case:  # fmt: skip
    """Read a prompt of 8192 tokens, B = 1, K = 8; `each`: every query head has picks of its own.

    The loop over picked blocks ends where the data says, so the compiler's simulation has no figure for it.
    """
    kv = jax.ShapeDtypeStruct((1, HEADS, TOKENS, width), dtype)
    q = jax.ShapeDtypeStruct((1, HEADS * group, TOKENS, width), dtype)
    lists, segments = HEADS * (group if each else 1), TOKENS // segment
    operands = (
        q, kv, kv, jax.ShapeDtypeStruct((1,), jnp.int32),
        jax.ShapeDtypeStruct((1, lists, segments, TOKENS // block), jnp.bool_),
    )  # fmt: skip
    pairs = int(SHARE * TOKENS * (TOKENS + segment) / 2)
    bits = jnp.dtype(dtype).itemsize
    read = 2 * lists * (pairs // segment) * width
    tiles = -(-int(SHARE * TOKENS / 2) // 512)
    return Case(
        partial(tpu_sparse_prompt, options=Options(width**-0.5, None)), operands,
        bits * (2 * HEADS * group * TOKENS * width + read), 4 * HEADS * group * width * pairs, 0,
        "sparse_prompt", trips={"1": lists * segments, "2": lists * segments * tiles}, profiles=False,
    )  # fmt: skip


CASES: dict[str, Callable[[Device], Case]] = {
    "sparse_prompt-bfloat16-512x32": partial(sparse_prompt, segment=512, block=32),
    "sparse_prompt-bfloat16-128x128-each": partial(sparse_prompt, segment=128, block=128, each=True),
    "sparse_prompt-bfloat16-64x64-each": partial(sparse_prompt, segment=64, block=64, each=True),
    "sparse_prompt-bfloat16-128x128-h64": partial(sparse_prompt, segment=128, block=128, width=64),
    "sparse_prompt-float32-128x128-each": partial(
        sparse_prompt, segment=128, block=128, each=True, dtype=jnp.float32
    ),
}
