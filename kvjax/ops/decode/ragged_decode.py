"""Attention of a few queries over KV heads of unequal lengths that are consecutive in one array of rows.

With budgets per head, slots are written once and then only read, so the slots of a KV head can stay
together: a head is its first row and its length, no table of pages is needed, and copies can be long.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8, UInt32

from kvjax.ops.attention.union import Keys, attend
from kvjax.ops.base.bit_packing import halves
from kvjax.ops.base.dispatch import form
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.rope import Rope
from kvjax.ops.decode.rotation import KeyRotation, in_kernel, no_tiles, rotated_channels, rotated_keys
from kvjax.ops.decode.rotation import refusal as no_rotation
from kvjax.ops.decode.stacked_decode import KEPT_NUMBERS, slots_per_step, tile_rows
from kvjax.ops.decode.stacked_decode_gpu import gpu_refusal, gpu_stacked_decode
from kvjax.pallas_kernels.block_sizes import cores_for
from kvjax.pallas_kernels.stacked_decode import kernel_tpu as tpu
from kvjax.pallas_kernels.streaming import LANES, SUBLANES

ALWAYS = np.iinfo(np.int32).max


class CodedRows(NamedTuple):
    """Rows as 8-bit codes; per slot, scales and zeros (`pair`): scale * code + zero."""

    codes: UInt8[Array, "R W"]
    scale_zero: UInt32[Array, "B K S"]


def ragged_decode(
    q: Float[Array, "B N T H"],
    k: Float[Array, "R W"] | CodedRows,
    v: Float[Array, "R V"] | CodedRows | None,
    starts: Int[Array, "B K"],
    lengths: Int[Array, "B K"],
    *,
    most: int,
    aligned: int,
    scale: float,
    values: int | None = None,
    bias: Float[Array, "B K S"] | None = None,
    rotation: KeyRotation | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:
    """Exact attention of every query over its KV head, rows starts .. starts + lengths - 1: (out, lse).

    Every query sees all slots of its KV head. v None: the values are the first `values` channels of k
    (latents). bias is added to the logits of a head's slots. rotation: how keys that are stored unrotated are
    rotated; queries are given rotated. most: the most slots that a head can have, the S of per-slot arrays,
    phases among them. aligned: all starts and R are multiples of it. lse is -inf, and out 0, for empty heads.
    Softmax in promote(float32, q). Rows after a head's length are not read.

    implementation: "reference", "tpu", "gpu", or these two with " interpret"; None takes the kernel if it can
    run. Raises NotImplementedError if a forced one cannot, ValueError if shapes do not fit.

    >>> k, starts, lengths = jnp.ones((8, 4)), jnp.asarray([[0, 4]]), jnp.asarray([[3, 2]])
    >>> q = jnp.zeros((1, 2, 1, 4))
    >>> out, lse = ragged_decode(q, k, k, starts, lengths, most=4, aligned=4, scale=1.0)
    >>> [round(float(x)) for x in jnp.exp(lse[0, :, 0])]
    [3, 2]
    """
    rows = rows_of(k)
    width = values or 0 if v is None else rows_of(v).shape[-1]
    slots = {x.shape[-1] for x in sides_of(k, v, bias, rotation).values()}
    if q.shape[1] % starts.shape[1] or q.shape[-1] != rows.shape[-1] or not 0 < width or slots - {most}:
        raise ValueError(
            f"q {list(q.shape)}, k {list(rows.shape)}, starts {list(starts.shape)}, {width} values, and "
            f"biases and scales of {sorted(slots) or most} slots do not fit: expected KV heads that divide "
            f"the query heads, keys as wide as q, `values` where v is None, and biases and scales of {most}"
        )
    options: dict[str, Any] = dict(
        most=most, scale=scale, values=width, bias=bias, rotation=rotation, softcap=softcap
    )
    why = refusals(
        q,
        rows,
        None if v is None else rows_of(v),
        aligned,
        (len(sides_of(k, v, bias, rotation)), starts.shape[1], most),
        None if rotation is None else rotation.rope,
    )
    chosen = form("ragged_decode", implementation, q, k, v, **why)
    if chosen == "reference":
        return _reference(q, k, v, starts, lengths, **options)
    if chosen.startswith("gpu"):
        return _on_gpu(q, k, v, starts, lengths, interpret=chosen != "gpu", **options)
    options |= dict(aligned=aligned, interpret=chosen != "tpu")
    return tpu_ragged_decode(q, k, v, starts, lengths, **options)


def rows_of(x: Array | CodedRows) -> Array:
    """Return the rows, unencoded or in codes."""
    return x.codes if isinstance(x, CodedRows) else x


def sides_of(
    k: Array | CodedRows, v: Array | CodedRows | None, bias: Array | None, rotation: KeyRotation | None = None
) -> dict[str, Array]:
    """Per-slot numbers, [B, K, S], by the names of the kernel."""
    given = {} if bias is None else {"bias": bias}
    if rotation is not None and rotated_channels(rotation.rope, rows_of(k).shape[-1]) is not None:
        given["phase"] = rotation.phase
    coded = {f"{n}_scale_zero": x for n, x in {"key": k, "value": v}.items() if isinstance(x, CodedRows)}
    return given | {name: x.scale_zero for name, x in coded.items()}


def refusals(
    q: Array, k: Array, v: Array | None, aligned: int, given: tuple[int, int, int], rope: Rope | None = None
) -> dict[str, str]:
    """Why the kernel of each platform cannot take these rows, whose keys are rotated by `rope` if given."""
    why = "" if rope is None else no_rotation(rope)
    tpu = why or refusal(q, k, v, aligned, given) or no_tiles(rope, q.shape[-1])
    return dict(tpu=tpu, gpu=why or gpu_refusal(q, given[1], k, v))


def refusal(q: Array, k: Array, v: Array | None, aligned: int, given: tuple[int, int, int]) -> str:
    """Why the TPU kernel cannot take these rows; empty if it can.

    given: how many numbers a slot has, the number of KV heads, and the slots of a head.
    """
    for x in (k, k if v is None else v):
        if x.shape[-1] % LANES:
            return f"rows are {x.shape[-1]} wide, expected a multiple of {LANES}"
        if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.uint8):
            return f"rows of {x.dtype}, expected float32, bfloat16 or codes in uint8"
        if aligned % tile_rows(x):
            return (
                f"lists begin at multiples of {aligned} rows, expected multiples of {tile_rows(x)}: give the "
                "method a page= of so many"
            )
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries of {q.dtype}, expected float32 or bfloat16"
    numbers, heads, slots = given
    if numbers and (aligned % LANES or 2 * numbers * heads * slots > KEPT_NUMBERS):
        return (
            f"{numbers} biases or scales of {heads} heads x {slots} slots in multiples of {aligned}, "
            f"expected multiples of {LANES} and at most {KEPT_NUMBERS // 2} numbers"
        )
    return ""


def _reference(
    q: Array, k: Array | CodedRows, v: Array | CodedRows | None, starts: Array, lengths: Array, *,
    most: int, scale: float, values: int, bias: Array | None, rotation: KeyRotation | None,
    softcap: float | None,
) -> tuple[Array, Array]:  # fmt: skip
    slot = jnp.arange(most, dtype=jnp.int32)[None, None]
    live = slot < lengths[..., None]
    row = jnp.minimum(starts[..., None] + slot, rows_of(k).shape[0] - 1)

    def plain(x: Array | CodedRows) -> Array:
        found = rows_of(x)[row].astype(wide(q))
        if isinstance(x, CodedRows):
            step, zero = (y.astype(wide(q))[..., None] for y in halves(x.scale_zero))
            found = found * step + zero
        return jnp.where(live[..., None], found, jnp.zeros((), wide(q)))

    keys = plain(k)
    met = keys if rotation is None else rotated_keys(rotation, keys, wide(q))
    bias = None if bias is None else jnp.where(live, bias, 0.0)
    seen = Keys(met, keys[..., :values] if v is None else plain(v), jnp.where(live, 0, -1), bias)
    zero = jnp.zeros((q.shape[0], q.shape[2]), jnp.int32)
    out, lse, _ = attend(q, seen, zero, scale=scale, softcap=softcap)
    return out, lse


def _on_gpu(
    q: Array, k: Array | CodedRows, v: Array | CodedRows | None, starts: Array, lengths: Array, *,
    most: int, values: int, bias: Array | None, rotation: KeyRotation | None, **options: Any,
) -> tuple[Array, Array]:  # fmt: skip
    every = jnp.full((q.shape[0], q.shape[2]), ALWAYS, jnp.int32)
    sides = {name: x[None] for name, x in sides_of(k, v, bias, rotation).items()}
    out, lse, _ = gpu_stacked_decode(
        q, rows_of(k)[None], None if v is None else rows_of(v)[None], lengths, starts[..., None], every,
        jnp.zeros((), jnp.int32), sides, most=most, values=(0, values),
        rope=None if rotation is None else rotation.rope, **options,
    )  # fmt: skip
    return out, lse


def tpu_ragged_decode(
    q: Array, k: Array | CodedRows, v: Array | CodedRows | None, starts: Array, lengths: Array, *,
    most: int, aligned: int, scale: float, values: int, bias: Array | None = None,
    rotation: KeyRotation | None = None, softcap: float | None = None,
    block: int | None = None, cores: int | None = None, interpret: Any = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Run the kernel on the operands of `ragged_decode`. block: slots per step."""
    b, n, t, h = q.shape
    heads, given = starts.shape[1], sides_of(k, v, bias, rotation)
    rows = [rows_of(x) for x in (k, v) if x is not None]
    lists, queries, piece = b * heads, n // heads * t, math.gcd(aligned, LANES)
    cores = cores or cores_for(lists)
    most = min(-(-most // piece) * piece, rows[0].shape[0] // piece * piece)
    block = block or slots_per_step(*rows)
    block = max(piece, min(block, most) // piece * piece)
    asked = jnp.pad(q.reshape(lists, queries, h), ((0, 0), (0, -queries % SUBLANES), (0, 0)))
    which, steps = in_kernel(rotation, h)
    sizes = tpu.Sizes(
        block, piece, lists // cores, scale, None, softcap, v is None, tuple(given), rotated=which
    )
    # Per-slot arrays are padded to whole blocks.
    sides = [jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[-1] % block)))[None] for x in given.values()]
    out, lse = tpu.stacked_decode(
        asked, rows[0][None], None if v is None else rows[1][None],
        lengths.reshape(-1).astype(jnp.int32), jnp.zeros((lists,), jnp.int32),
        starts.reshape(-1).astype(jnp.int32), jnp.full((*asked.shape[:2], LANES), ALWAYS, jnp.int32),
        jnp.zeros((1,), jnp.int32), tuple(sides), steps, sizes=sizes, cores=cores, interpret=interpret,
    )  # fmt: skip
    return out[:, :queries, :values].reshape(b, n, t, values), lse[:, :queries, 0].reshape(b, n, t)
