"""Decoding on a GPU over consecutive rows: dense KV heads, heads of unequal lengths, picked pages."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.ops.base.rope import Rope
from kvjax.ops.decode import partial_gpu as parts
from kvjax.ops.decode.rotation import angle_steps, rotated_channels
from kvjax.pallas_kernels.rotation import RotatedChannels


def gpu_refusal(q: Array, heads: int, k: Array, v: Array | None) -> str:
    """Why the GPU kernel cannot take these queries and rows; empty if it can."""
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
    rope: Rope | None = None,
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
    """Run the kernel for KV heads of at most `most` slots: (out, lse, mass if needed).

    k, v: M rows of all KV heads in each of L layers. A head's rows begin at origins [B, K, 1], or those of
    its P pages of `page` slots at origins [B, K, P]. v None: rows of k hold keys and values. values: the
    first channel of the values and their number. sides [1 or L, B, K, S]: per-slot numbers by name; a bias
    may be per query head, [1, B, N, S]. rope: how keys are rotated by the side "phase". block, programs,
    warps, stages: see `partial_gpu`.
    """
    from kvjax.pallas_kernels.stacked_decode import kernel_gpu as gpu

    heads, lists = lengths.shape[1], lengths.size
    width = max(x.shape[2] for x in (k, v) if x is not None)
    how = parts.cut(q, heads, most, width, block=block, programs=programs, warps=warps, stages=stages)
    asked, pos = parts.asked(q, q_pos, heads, parts.power(k.shape[2]))
    which = None if rope is None else rotated_channels(rope, q.shape[3])
    sizes = gpu.Sizes(how, scale, window, softcap, v is None, tuple(sides), most if mass else 0, page, which)
    rotating: tuple[Array, ...] = ()
    if rope is not None and which is not None:
        asked, pairs = _apart(asked, which)
        steps = angle_steps(rope, q.shape[3])
        rotating = pairs, jnp.pad(jnp.asarray(steps), (0, pairs.shape[3] - len(steps)))
    outs, lses, *logits = gpu.stacked_decode(
        asked, k, v, lengths.reshape(-1), origins.reshape(lists, -1), pos, layer[None],
        tuple(_of_lists(x, heads, q) for x in sides.values()), rotating, sizes=sizes, interpret=interpret,
    )  # fmt: skip
    first, count = values
    out, lse = parts.merged(outs[..., first : first + count], lses, q)
    return out, lse, parts.mass_of(logits[0], lse, lengths, most) if mass else None


def _of_lists(x: Shaped[Array, "L B K S"], heads: int, q: Float[Array, "B N T H"]) -> Array:
    """Reshape numbers per slot: to [L, I, S] if they are per KV head, to [L, I, Q, S] if per query head.

    L: layers, or 1. I = B K: lists of slots, one per row and KV head. Q = N T / K: queries of each list.
    """
    layers, b, many, slots = x.shape
    if many == heads:
        return x.reshape(layers, b * heads, slots)
    return jnp.repeat(x, q.shape[2], axis=2).reshape(layers, b * heads, -1, slots)


def _apart(
    asked: Float[Array, "I R W"], which: RotatedChannels
) -> tuple[Float[Array, "I R W"], Float[Array, "I 2 R P"]]:
    """Return the queries with rotated channels set to 0, and the first and second channels of all pairs.

    I: lists of slots, one per row and KV head. R: queries of each list. P: pairs, padded to a power of two.
    """
    start, half = which.start, which.half
    pairs = jnp.stack([asked[..., start + n * half : start + (n + 1) * half] for n in range(2)], axis=1)
    rest = asked.at[..., start : start + 2 * half].set(0)
    return rest, jnp.pad(pairs, ((0, 0),) * 3 + ((0, parts.power(half) - half),))
