"""Attention of a few queries over the stacked cache of all layers in KIVI's grouped codes.

Keys have a scale and a zero for every channel of `group` tokens, values for every `group` channels of a
token (Liu et al., 2024, arXiv:2402.02750, section 3): 1, 2 or 4 bits a number, packed along the tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from kvjax.ops.attention.union import Keys, attend
from kvjax.ops.base.bit_packing import halves, unpack_tokens
from kvjax.ops.base.dispatch import INTERPRET, form
from kvjax.ops.base.dtypes import wide
from kvjax.ops.decode import partial_gpu as parts
from kvjax.pallas_kernels.block_sizes import cores_for, tuned
from kvjax.pallas_kernels.grouped_decode import kernel_tpu as tpu
from kvjax.pallas_kernels.streaming import LANES, SUBLANES

# Two programs with this many registers fit each of the 132 processors of an H100 at once.
PROGRAMS = 256


class Grouped(NamedTuple):
    """Codes and their scales: words [L, B, K, S bits / 32, W] and scale_zero [L, B, K, S / group, W].

    Both in the layout of `kvjax.store.affine.Affine`: words of `bit_packing.pack_tokens`, group by group, and
    scales and zeros in words of `bit_packing.pair`: one per channel (keys), or, for one group of channels
    after the other, one per token of a group (values).
    """

    words: UInt32[Array, "L B K R W"]
    scale_zero: UInt32[Array, "L B K G W"]


def grouped_decode(
    q: Float[Array, "B N T W"],
    k: Grouped,
    v: Grouped,
    lengths: Int[Array, "B K"],
    layer: int | Int[Array, ""] = 0,
    *,
    bits: int,
    group: int,
    scale: float,
    softcap: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N T W"], Float[Array, "B N T"]]:
    """Exact attention of every query over the first `lengths` slots of layer `layer`: (out, lse).

    Slots after the length are not read. lse is -inf, and out 0, if the length is 0. Softmax
    in promote(float32, q).

    implementation: "reference", "tpu", "gpu", or these two with " interpret"; None takes the kernel if it can
    run. Raises NotImplementedError if a forced one cannot, ValueError if shapes do not fit.

    >>> from kvjax.store.affine import Affine
    >>> x = jnp.broadcast_to(jnp.arange(64.0)[:, None], (1, 1, 1, 64, 32))
    >>> k = Affine(2, axis="channel", group=32).encode(0 * x)
    >>> v = Affine(2, group=32, together=32).encode(x)
    >>> out, lse = grouped_decode(
    ...     jnp.ones((1, 1, 1, 32)), Grouped(**k), Grouped(**v), jnp.asarray([[5]]),
    ...     bits=2, group=32, scale=1.0,
    ... )
    >>> float(out[0, 0, 0, 0]), round(float(jnp.exp(lse[0, 0, 0])))
    (2.0, 5)
    """
    b, n, _, width = q.shape
    slots = k.scale_zero.shape[3] * group
    fit = lengths.shape == k.words.shape[1:3] and n % lengths.shape[1] == 0 and lengths.shape[0] == b
    for words, numbers in (k, v):
        fit &= words.shape[3:] == (slots * bits // 32, width) and numbers.shape[3:] == (slots // group, width)
    if not fit:
        shapes = [list(x.shape) for x in (q, *k, *v, lengths)]
        raise ValueError(
            f"q, codes and scales of keys and of values, and lengths of shapes {shapes} do not fit {bits} "
            f"bits in groups of {group}: expected [.., S * {bits} / 32, W] and [.., S / {group}, W] of each"
        )
    at = jnp.asarray(layer, jnp.int32)
    chosen = form("grouped_decode", implementation, q, k, v, **refusals(q, k, bits, group))
    if chosen == "reference":
        return _reference(q, k, v, lengths, at, bits=bits, group=group, scale=scale, softcap=softcap)
    run = gpu_grouped_decode if chosen.startswith("gpu") else tpu_grouped_decode
    return run(
        q, k, v, lengths, at, bits=bits, group=group, scale=scale, softcap=softcap,
        interpret=chosen.endswith(INTERPRET),
    )  # fmt: skip


def refusals(q: Array, k: Grouped, bits: int, group: int) -> dict[str, str]:
    """Why the kernel of each platform cannot take these operands."""
    return dict(tpu=refusal(q, k, bits, group), gpu=gpu_refusal(q, k, bits, group))


def gpu_refusal(q: Array, k: Grouped, bits: int, group: int) -> str:
    """Why the GPU kernel cannot take these operands; empty if it can."""
    if bits not in (1, 2, 4) or group not in (16, 32, 64, 128) or group * bits % 32:
        return f"groups of {group} in {bits} bits, expected whole words in groups of 16, 32, 64 or 128"
    return parts.gpu_refusal(q, k.words.shape[2], {"rows": k.words.shape[4]})


def refusal(q: Array, k: Grouped, bits: int, group: int) -> str:
    """Why the TPU kernel cannot take these operands; empty if it can."""
    width, groups, run = k.words.shape[4], k.scale_zero.shape[3], group * bits // 4
    if width % LANES:
        return f"rows are {width} wide, expected a multiple of {LANES}"
    if bits not in (1, 2, 4) or run not in (16, 32, 64, 128):
        return f"groups of {group} tokens in {bits} bits, expected 16, 32, 64 or 128 * {4 // bits}"
    if LANES % group:
        return f"groups of {group} channels, expected a divisor of {LANES}"
    if groups % SUBLANES:
        return f"{groups} groups of {group} tokens, expected a multiple of {SUBLANES}"
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries of {q.dtype}, expected float32 or bfloat16"
    return ""


def _reference(
    q: Array, k: Grouped, v: Grouped, lengths: Array, layer: Array, *,
    bits: int, group: int, scale: float, softcap: float | None,
) -> tuple[Array, Array]:  # fmt: skip
    dtype = wide(q)

    def split(words: Array) -> Array:
        """Split the rows of one layer, group by group: [B, K, groups, rows of a group, W]."""
        found = words[layer]
        return found.reshape(*found.shape[:2], slots // group, -1, found.shape[-1])

    slots = k.scale_zero.shape[3] * group
    codes, values = (unpack_tokens(split(x.words), bits, group).astype(dtype) for x in (k, v))
    step, zero = (split(x).astype(dtype) for x in halves(k.scale_zero))
    keys = codes * step + zero
    own = (split(x).astype(dtype) for x in halves(v.scale_zero))
    # Values have a scale per token and group of channels, [.., 1, groups of channels, tokens]. Swapping the
    # last two axes puts tokens first, and repeating gives every channel its own.
    step, zero = (
        jnp.repeat(jnp.swapaxes(x.reshape(*x.shape[:3], -1, group), -1, -2), group, axis=-1) for x in own
    )
    live = jnp.arange(slots, dtype=jnp.int32)[None, None] < lengths[..., None]
    keys, values = (
        jnp.where(live[..., None], x.reshape(*live.shape, -1), 0.0) for x in (keys, values * step + zero)
    )
    seen = Keys(keys, values, jnp.where(live, 0, -1))
    out, lse, _ = attend(
        q, seen, jnp.zeros((q.shape[0], q.shape[2]), jnp.int32), scale=scale, softcap=softcap
    )
    return out, lse


def gpu_grouped_decode(
    q: Array, k: Grouped, v: Grouped, lengths: Array, layer: Array, *,
    bits: int, group: int, scale: float, softcap: float | None = None, block: int | None = None,
    programs: int | None = None, warps: int | None = None, stages: int = 2, interpret: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Run the kernel on operands of `grouped_decode`. block, programs, warps, stages: see `partial_gpu`."""
    from kvjax.pallas_kernels.grouped_decode import kernel_gpu as gpu

    (heads, rows, width), lists = k.words.shape[2:], lengths.size
    block = block or (16 if group < 32 else None)
    if width > 128:
        programs, warps = programs or PROGRAMS // 2, warps or 8
    programs = programs or PROGRAMS
    how = parts.cut(q, heads, rows, width, block=block, programs=programs, warps=warps, stages=stages)
    asked, _ = parts.asked(q, jnp.zeros((q.shape[0], q.shape[2]), jnp.int32), heads, parts.power(width))
    outs, lses = gpu.grouped_decode(
        asked, tuple(x.reshape(x.shape[0], lists, *x.shape[3:]) for x in (*k, *v)),
        lengths.reshape(-1).astype(jnp.int32), layer[None],
        sizes=gpu.Sizes(how, bits, group, scale, softcap), interpret=interpret,
    )  # fmt: skip
    return parts.merged(outs, lses, q)


def tpu_grouped_decode(
    q: Array, k: Grouped, v: Grouped, lengths: Array, layer: Array, *,
    bits: int, group: int, scale: float, softcap: float | None = None,
    block: int | None = None, cores: int | None = None, interpret: Any = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Run the kernel on the operands of `grouped_decode`. block: slots per step."""
    b, n, t, width = q.shape
    heads, groups = k.scale_zero.shape[2:4]
    lists, queries = b * heads, n // heads * t
    cores = cores or cores_for(lists)
    tile = SUBLANES * group
    block = block or slots_per_step(bits, width)
    block = max(tile, min(block, groups * group) // tile * tile)
    asked = jnp.pad(q.reshape(lists, queries, width), ((0, 0), (0, -queries % SUBLANES), (0, 0)))
    caches = tuple(x.reshape(x.shape[0], lists, *x.shape[3:]) for x in (*k, *v))
    sizes = tpu.Sizes(block, bits, group, lists // cores, scale, softcap)
    out, lse = tpu.grouped_decode(
        asked, caches, lengths.reshape(-1).astype(jnp.int32), layer[None],
        sizes=sizes, cores=cores, interpret=interpret,
    )  # fmt: skip
    return out[:, :queries].reshape(q.shape), lse[:, :queries, 0].reshape(b, n, t)


def slots_per_step(bits: int, width: int, generation: str | None = None) -> int:
    """Return the tuned number of slots, or one that fits into every generation's memory and registers."""
    return tuned("grouped_decode", f"uint{bits}", width, generation) or 2048
