"""Decoding on a GPU over rows behind each other: dense lists, lists of unequal lengths, picked pages."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.ops.decode import partial_gpu as parts


def gpu_refusal(q: Array, heads: int, k: Array, v: Array | None) -> str:
    """Why the GPU kernel cannot take these queries and rows; empty where it can."""
    for x in (k, k if v is None else v):
        if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.uint8):
            return f"a cache of {x.dtype}, expected float32, bfloat16 or codes in uint8"
    rows = {"keys": k.shape[-1]} | ({} if v is None else {"values": v.shape[-1]})
    return parts.gpu_refusal(q, heads, rows)


def gpu_stacked_decode(
    q: Float[Array, "B N T H"],
    k: Shaped[Array, "L M W"],
    v: Shaped[Array, "L M V"] | None,
    lengths: Int[Array, "B K"],
    origins: Int[Array, "B K P"],
    q_pos: Int[Array, "B T"],
    layer: Int[Array, ""],
    sides: dict[str, Array],
    *,
    most: int,
    values: tuple[int, int],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    mass: bool = False,
    page: int = 0,
    block: int | None = None,
    programs: int | None = None,
    warps: int | None = None,
    stages: int = 3,
    interpret: bool = False,
) -> tuple[Float[Array, "B N T X"], Float[Array, "B N T"], Float[Array, "B K S"] | None]:
    """The kernel on lists of at most `most` slots: (out, lse, mass where asked for).

    A list's rows begin at origins [B, K, 1], or those of its pages of `page` slots at origins [B, K, P].
    v None: rows of k hold both. values: the first channel of the values and how many they are. sides
    [1 or L, B, K, S]: what the slots are given, by name. block, programs, warps, stages: see `partial_gpu`.
    """
    from kvjax.pallas_kernels.stacked_decode import kernel_gpu as gpu

    heads, lists = lengths.shape[1], lengths.size
    width = max(x.shape[2] for x in (k, v) if x is not None)
    how = parts.cut(q, heads, most, width, block=block, programs=programs, warps=warps, stages=stages)
    asked, pos = parts.asked(q, q_pos, heads, parts.power(k.shape[2]))
    sizes = gpu.Sizes(how, scale, window, softcap, v is None, tuple(sides), most if mass else 0, page)
    outs, lses, *logits = gpu.stacked_decode(
        asked, k, v, lengths.reshape(-1), origins.reshape(lists, -1), pos, layer[None],
        tuple(x.reshape(x.shape[0], lists, x.shape[3]) for x in sides.values()),
        sizes=sizes, interpret=interpret,
    )  # fmt: skip
    first, count = values
    out, lse = parts.merged(outs[..., first : first + count], lses, q)
    return out, lse, parts.mass_of(logits[0], lse, lengths, most) if mass else None
