"""Paged decoding on a GPU: what its kernel takes, how the work is split, and how the parts are merged."""

from __future__ import annotations

import importlib.util

import jax.numpy as jnp
from jax import Array

from kvjax.ops.page_pool import PagePool
from kvjax.ops.rope import Rope

NEG_INF = float("-inf")
MOST_QUERIES = 64
PROGRAMS = 1024


def gpu_refusal(pool: PagePool, q: Array, heads: int, rope: Rope | None = None) -> str:
    """Why the GPU kernel cannot take these operands; empty where it can."""
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return "this release of jax has no Triton lowering any more: use an older one or 'reference'"
    if rope is not None:
        return "keys are to be turned, expected turned ones"
    if pool.packed or pool.groups > 1:
        return "values beside keys or several groups to a page, expected rows of their own and one group"
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries of {q.dtype}, expected float32 or bfloat16"
    queries = q.shape[1] // heads * q.shape[2]
    if queries > MOST_QUERIES:
        return f"{queries} queries for each KV head, expected at most {MOST_QUERIES}"
    if pool.words.shape[-1] > 512:
        return f"pages are {pool.words.shape[-1]} wide, expected at most 512"
    return ""


def gpu_paged_decode(
    q: Array, pool: PagePool, table: Array, lengths: Array, q_pos: Array, layer: Array, *,
    scale: float, window: int | None, softcap: float | None, mass: bool,
    block: int | None = None, programs: int = PROGRAMS, warps: int | None = None, stages: int = 2,
    interpret: bool = False,
) -> tuple[Array, Array, Array | None]:  # fmt: skip
    """The kernel on the operands of `paged_decode`.

    block: rows of words per step; programs: about how many run, each a split of a list; warps, stages: of the
    compiler. These four change no result by more than rounding.
    """
    from kvjax.pallas_kernels.paged_decode import kernel_gpu as gpu

    b, n, t, h = q.shape
    heads, width = table.shape[1], pool.words.shape[-1]
    queries, lists = n // heads * t, b * heads
    # Without matrix units, as float32 is exact, a step's products take more registers than its operands.
    block = block or (16 if width > 128 or q.dtype == jnp.float32 else 32)
    warps = warps or (8 if q.dtype == jnp.float32 else 4)
    steps = -(-table.shape[2] * pool.rows // block)
    blocks = max(1, -(-steps * lists // programs))
    splits = -(-steps // blocks)
    pages = -(-(splits * blocks * block) // pool.rows)
    tables = jnp.pad(table.reshape(lists, -1), ((0, 0), (0, pages - table.shape[2])))
    count, lanes = (max(gpu.SMALLEST, 1 << (x - 1).bit_length()) for x in (queries, width))
    pad = (0, count - queries)
    asked = jnp.pad(q.reshape(lists, queries, h), ((0, 0), pad, (0, lanes - h)))
    pos = jnp.broadcast_to(q_pos[:, None, None], (b, heads, n // heads, t)).reshape(lists, queries)
    pos = jnp.pad(pos, ((0, 0), pad), constant_values=-1)
    sizes = gpu.Sizes(
        block, blocks, splits, warps, stages, pool.page, pool.rows, pool.payload, pool.names, queries,
        scale, window, softcap, mass,
    )  # fmt: skip
    parts, lses, *logits = gpu.paged_decode(
        asked, pool.words, tables, lengths.reshape(-1), pos, layer[None], sizes=sizes, interpret=interpret
    )
    out, lse = _merged(parts[:, :, :queries, :h], lses[:, :, :queries])
    found = None
    if mass:
        slots = table.shape[2] * pool.page
        z = logits[0][:, :queries, :slots]
        base = jnp.where(lse == NEG_INF, 0.0, lse)[..., None]
        live = jnp.arange(slots)[None] < lengths.reshape(-1, 1)
        found = jnp.where(live[:, None], jnp.exp(z - base), 0.0).sum(1).reshape(b, heads, slots)
    return out.reshape(b, n, t, h).astype(q.dtype), lse.reshape(b, n, t), found


def _merged(outs: Array, lses: Array) -> tuple[Array, Array]:
    """The union of partial attentions [I, C, R, H] along C: `kvjax.ops.attention.merge` without a list."""
    top = lses.max(1, keepdims=True)
    top = jnp.where(top == NEG_INF, 0.0, top)
    w = jnp.exp(lses - top)
    total = w.sum(1)
    safe = jnp.where(total == 0.0, 1.0, total)
    out = (outs * w[..., None]).sum(1) / safe[..., None]
    return out, jnp.where(total == 0.0, NEG_INF, top[:, 0] + jnp.log(safe))
