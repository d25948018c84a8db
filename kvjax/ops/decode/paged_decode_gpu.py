"""Paged decoding on a GPU: which operands its kernel takes, and how the work is split."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from kvjax.ops.base.rope import Rope
from kvjax.ops.decode import partial_gpu as parts
from kvjax.ops.decode.page_pool import PagePool


def gpu_refusal(pool: PagePool, q: Array, heads: int, rope: Rope | None = None) -> str:
    """Why the GPU kernel cannot take these operands; empty if it can."""
    if rope is not None:
        return "keys are stored unrotated, expected rotated ones"
    if pool.packed or pool.groups > 1:
        return "values beside keys or several groups to a page, expected rows of their own and one group"
    return parts.gpu_refusal(q, heads, {"pages": pool.words.shape[-1]})


def gpu_paged_decode(
    q: Array, pool: PagePool, table: Array, lengths: Array, q_pos: Array, layer: Array, *,
    scale: float, window: int | None, softcap: float | None, mass: bool,
    block: int | None = 16, programs: int | None = None, warps: int | None = None, stages: int = 2,
    interpret: bool = False,
) -> tuple[Array, Array, Array | None]:  # fmt: skip
    """Run the kernel on the operands of `paged_decode`. block: rows of words; the others: `partial_gpu`."""
    from kvjax.pallas_kernels.paged_decode import kernel_gpu as gpu

    b, _, _, h = q.shape
    heads, width = table.shape[1], pool.words.shape[-1]
    how = parts.cut(
        q,
        heads,
        table.shape[2] * pool.rows,
        width,
        block=block,
        programs=programs,
        warps=warps,
        stages=stages,
    )
    pages = -(-(how.splits * how.blocks * how.block) // pool.rows)
    tables = jnp.pad(table.reshape(b * heads, -1), ((0, 0), (0, pages - table.shape[2])))
    asked, pos = parts.asked(q, q_pos, heads, parts.power(width))
    sizes = gpu.Sizes(how, pool.page, pool.rows, pool.payload, pool.names, scale, window, softcap, mass)
    outs, lses, *logits = gpu.paged_decode(
        asked, pool.words, tables, lengths.reshape(-1), pos, layer[None], sizes=sizes, interpret=interpret
    )
    out, lse = parts.merged(outs[..., :h], lses, q)
    return out, lse, parts.mass_of(logits[0], lse, lengths, table.shape[2] * pool.page) if mass else None
