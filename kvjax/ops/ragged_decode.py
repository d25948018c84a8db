"""Attention of a few queries over lists of unequal lengths that lie behind each other in one array of rows.

What budgets per head leave is written once and then only read, so a list's slots can stay together: a list is
its first row and its length, no table of pages is followed, and a copy is as long as memory likes it.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.ops.attention import Keys, attend
from kvjax.ops.dispatch import form
from kvjax.ops.dtypes import wide
from kvjax.ops.stacked_decode import KEPT_NUMBERS, slots_per_step, tile_rows
from kvjax.pallas_kernels.blocks import cores_for
from kvjax.pallas_kernels.stacked_decode import kernel_tpu as tpu
from kvjax.pallas_kernels.streaming import LANES, SUBLANES

ALWAYS = np.iinfo(np.int32).max


def ragged_decode(
    q: Float[Array, "B N T H"],
    k: Float[Array, "R W"],
    v: Float[Array, "R V"] | None,
    starts: Int[Array, "B K"],
    lengths: Int[Array, "B K"],
    *,
    most: int,
    aligned: int,
    scale: float,
    values: int | None = None,
    bias: Float[Array, "B K S"] | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:
    """Exact attention of every query over its list, rows starts .. starts + lengths - 1: (out, lse).

    Every query sees its whole list. v None: the values are the first `values` channels of k (latents). bias
    is added to the logits of a list's slots. most: slots of the longest list there can be, S of bias.
    aligned: what all starts and R are multiples of. lse is -inf, and out 0, for empty lists. Softmax in
    promote(float32, q). What rows behind a list's length hold does not matter.

    implementation: "reference", "tpu" or "tpu interpret"; None takes the kernel where it can run. Raises
    NotImplementedError where a forced one cannot, ValueError where shapes do not fit.

    >>> k, starts, lengths = jnp.ones((8, 4)), jnp.asarray([[0, 4]]), jnp.asarray([[3, 2]])
    >>> q = jnp.zeros((1, 2, 1, 4))
    >>> out, lse = ragged_decode(q, k, k, starts, lengths, most=4, aligned=4, scale=1.0)
    >>> [round(float(x)) for x in jnp.exp(lse[0, :, 0])]
    [3, 2]
    """
    width = values or 0 if v is None else v.shape[-1]
    slots = most if bias is None else bias.shape[-1]
    if q.shape[1] % starts.shape[1] or q.shape[-1] != k.shape[-1] or not 0 < width or slots != most:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}, starts {list(starts.shape)}, {width} values and biases "
            f"of {slots} slots do not fit: expected KV heads that divide the query heads, keys as wide as q, "
            f"`values` where v is None, and biases of {most}"
        )
    options: dict[str, Any] = dict(most=most, scale=scale, values=width, bias=bias, softcap=softcap)
    why = refusal(q, k, v, aligned, None if bias is None else bias.shape)
    chosen = form("ragged_decode", implementation, tpu=why)
    if chosen == "reference":
        return _reference(q, k, v, starts, lengths, **options)
    options |= dict(aligned=aligned, interpret=chosen != "tpu")
    return tpu_ragged_decode(q, k, v, starts, lengths, **options)


def refusal(q: Array, k: Array, v: Array | None, aligned: int, biases: tuple[int, ...] | None = None) -> str:
    """Why the TPU kernel cannot take these operands, and biases of that shape; empty where it can."""
    for x in (k, k if v is None else v):
        if x.shape[-1] % LANES:
            return f"rows are {x.shape[-1]} wide, expected a multiple of {LANES}"
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"rows of {x.dtype}, expected float32 or bfloat16"
        if aligned % tile_rows(x):
            return f"lists begin at multiples of {aligned} rows, expected multiples of {tile_rows(x)}"
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries of {q.dtype}, expected float32 or bfloat16"
    if biases is not None and (aligned % LANES or 2 * biases[1] * biases[2] > KEPT_NUMBERS):
        return (
            f"biases of {biases[1]} heads x {biases[2]} slots in multiples of {aligned}, expected multiples "
            f"of {LANES} and at most {KEPT_NUMBERS // 2} numbers"
        )
    return ""


def _reference(
    q: Array, k: Array, v: Array | None, starts: Array, lengths: Array, *,
    most: int, scale: float, values: int, bias: Array | None, softcap: float | None,
) -> tuple[Array, Array]:  # fmt: skip
    slot = jnp.arange(most, dtype=jnp.int32)[None, None]
    live = slot < lengths[..., None]
    row = jnp.minimum(starts[..., None] + slot, k.shape[0] - 1)
    keys, found = (
        jnp.where(live[..., None], x[row].astype(wide(q)), jnp.zeros((), wide(q)))
        for x in (k, k[:, :values] if v is None else v)
    )
    bias = None if bias is None else jnp.where(live, bias, 0.0)
    seen = Keys(keys, found, jnp.where(live, 0, -1), bias)
    zero = jnp.zeros((q.shape[0], q.shape[2]), jnp.int32)
    out, lse, _ = attend(q, seen, zero, scale=scale, softcap=softcap)
    return out, lse


def tpu_ragged_decode(
    q: Array, k: Array, v: Array | None, starts: Array, lengths: Array, *,
    most: int, aligned: int, scale: float, values: int, bias: Array | None = None,
    softcap: float | None = None, block: int | None = None, cores: int | None = None, interpret: Any = False,
) -> tuple[Array, Array]:  # fmt: skip
    """The kernel on the operands of `ragged_decode`. block: slots per step."""
    b, n, t, h = q.shape
    heads = starts.shape[1]
    lists, queries, piece = b * heads, n // heads * t, math.gcd(aligned, LANES)
    cores = cores or cores_for(lists)
    most = min(-(-most // piece) * piece, k.shape[0] // piece * piece)
    block = block or slots_per_step(*(x for x in (k, v) if x is not None))
    block = max(piece, min(block, most) // piece * piece)
    asked = jnp.pad(q.reshape(lists, queries, h), ((0, 0), (0, -queries % SUBLANES), (0, 0)))
    sides, sizes = (), tpu.Sizes(block, piece, lists // cores, scale, None, softcap, v is None)
    if bias is not None:
        # Blocks are cut out of the biases: the last one is whole.
        sides = (jnp.pad(bias.astype(jnp.float32), ((0, 0), (0, 0), (0, -bias.shape[-1] % block)))[None],)
        sizes = sizes._replace(sides=("bias",))
    out, lse = tpu.stacked_decode(
        asked, k[None], None if v is None else v[None],
        lengths.reshape(-1).astype(jnp.int32), jnp.zeros((lists,), jnp.int32),
        starts.reshape(-1).astype(jnp.int32), jnp.full((*asked.shape[:2], LANES), ALWAYS, jnp.int32),
        jnp.zeros((1,), jnp.int32), sides, sizes=sizes, cores=cores, interpret=interpret,
    )  # fmt: skip
    return out[:, :queries, :values].reshape(b, n, t, values), lse[:, :queries, 0].reshape(b, n, t)
