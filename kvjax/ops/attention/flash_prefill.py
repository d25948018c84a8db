"""Exact attention of many queries over slots, block by block, with gradients.

One function serves a prompt over itself and a chunk of a prompt over an existing cache: positions
alone decide what is visible, as in `kvjax.ops.attention.union`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.ops.attention.union import NEG_INF, Keys, logits, weigh
from kvjax.ops.base.dispatch import form
from kvjax.ops.base.dtypes import wide
from kvjax.pallas_kernels.flash_prefill import backward_tpu, kernel_tpu
from kvjax.pallas_kernels.flash_prefill.plan import Sizes

LANES = 128
SMEM_BYTES, PART_BYTES = 2**19, 2**21
KINDS = (jnp.float32, jnp.bfloat16)


class FlashBlocks(NamedTuple):
    """Tokens and slots per block, multiples of 128: for attention, and for its gradients."""

    q: int
    kv: int
    back_q: int
    back_kv: int


def flash_prefill(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S V"],
    q_pos: Int[Array, "B T"],
    k_pos: Int[Array, "B S"] | Int[Array, "B #K S"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    q_segments: Int[Array, "B T"] | None = None,
    k_segments: Int[Array, "B S"] | None = None,
    blocks: FlashBlocks | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:
    """Attention of T queries over S slots in any order, (out, lse), both differentiable.

    A slot is visible if its position is known (not below 0), not in the query's future, inside a sliding
    window if there is one, and in the query's segment. lse is -inf, and out 0, if a query sees nothing. The
    contents of slots and queries without a position are never used. A learned sink is
    `kvjax.ops.attention.sinks.add_slot` on the result. Tiled exact attention: FlashAttention-2 (Dao, 2023,
    arXiv:2307.08691); softmax in float32.

    implementation: "reference" (which holds all logits at once), "tpu" or "tpu interpret"; None takes the
    kernel where it can run. Raises NotImplementedError if a forced one cannot, ValueError if shapes do
    not fit.

    >>> x = jnp.ones((1, 1, 3, 8))
    >>> out, lse = flash_prefill(x, x, x, jnp.arange(3)[None], jnp.asarray([[0, 1, -1]]), scale=0.0)
    >>> jnp.exp(lse).round().tolist(), out[0, 0, 0, 0].item()
    ([[[1.0, 2.0, 2.0]]], 1.0)
    """
    _check(q, k, v, k_pos, q_segments, k_segments)
    k_pos = k_pos if k_pos.ndim == 3 else k_pos[:, None]
    options: dict[str, Any] = dict(scale=scale, window=window, softcap=softcap)
    places = (q_pos, k_pos, q_segments, k_segments)
    chosen = form("flash_prefill", implementation, q, k, v, tpu=refusal(q, k, v, k_pos, blocks))
    if chosen == "reference":
        return _reference(q, k, v, *places, **options)
    return tpu_flash_prefill(q, k, v, *places, blocks=blocks, interpret=chosen != "tpu", **options)


def _check(
    q: Array, k: Array, v: Array, k_pos: Array, q_segments: Array | None, k_segments: Array | None
) -> None:
    b, n, _, h = q.shape
    heads, slots = k.shape[1:3]
    fits = k.shape[0] == b and k.shape[3] == h and n % heads == 0 and v.shape[:3] == k.shape[:3]
    if not fits or k_pos.shape[0] != b or k_pos.shape[-1] != slots:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} and k_pos {list(k_pos.shape)} do not "
            "fit: expected one number of sequences and of slots, KV heads that divide query heads, one width"
        )
    if (q_segments is None) != (k_segments is None):
        raise ValueError("got segments of one side only, expected both q_segments and k_segments, or neither")


def refusal(q: Array, k: Array, v: Array, k_pos: Array, blocks: FlashBlocks | None = None) -> str:
    """Why the TPU kernel cannot take these operands; empty if it can."""
    if any(x.dtype not in KINDS for x in (q, k, v)):
        return f"q, k and v of {q.dtype}, {k.dtype} and {v.dtype}, expected float32 or bfloat16"
    if blocks is not None and any(x <= 0 or x % LANES for x in blocks):
        return f"blocks of {tuple(blocks)}, expected multiples of {LANES}"
    size = blocks or default_blocks(q, k, v)
    lists = k_pos.shape[0] * (k_pos.shape[1] if k_pos.ndim == 3 else 1)
    # Two numbers for every block of queries are in scalar memory.
    most = -(-q.shape[2] // min(size.q, size.back_q))
    if 8 * lists * most > SMEM_BYTES:
        return f"{lists} lists of {most} blocks, whose plan exceeds the scalar memory: take larger blocks"
    return ""


def default_blocks(
    q: Array | jax.ShapeDtypeStruct, k: Array | jax.ShapeDtypeStruct, v: Array | jax.ShapeDtypeStruct
) -> FlashBlocks:
    """Return the block sizes that the compiler's figures favour (docs/kernels.md)."""
    group, single = q.shape[1] // k.shape[1], q.dtype == jnp.float32
    wide = max(q.shape[3], v.shape[3]) > LANES
    rows = 4096 // (2 if wide else 1) // (4 if single else 1)
    tokens = min(int(1024 / math.sqrt(group)), rows // group)
    back = min(512, 1024 // group // (2 if single else 1))
    tokens, back = (max(LANES, x // LANES * LANES) for x in (tokens, back))
    return FlashBlocks(tokens, 512, back, 256 if single else 512)


def slots_in_vmem(block: int, h: int, v: int) -> int:
    """How many slots, in whole blocks, have their key and value gradients summed in VMEM at once."""
    return max(1, PART_BYTES // (4 * block * (h + v))) * block


def _reference(
    q: Array, k: Array, v: Array, q_pos: Array, k_pos: Array, q_segments: Array | None,
    k_segments: Array | None, *, scale: float, window: int | None, softcap: float | None,
) -> tuple[Array, Array]:  # fmt: skip
    dtype = wide(q, k, v)

    def real(x: Array, pos: Array) -> Array:
        return jnp.where(pos[..., None] >= 0, x, jnp.zeros((), x.dtype)).astype(dtype)

    keys = Keys(real(k, k_pos), real(v, k_pos), k_pos)
    z = logits(real(q, q_pos[:, None]), keys, q_pos, scale=scale, window=window, softcap=softcap)
    if q_segments is not None and k_segments is not None:
        same = q_segments[:, :, None] == k_segments[:, None]
        z = jnp.where(same[:, None, None], z, NEG_INF)
    out, lse, _ = weigh([z], [keys])
    return out.astype(q.dtype), lse


def tpu_flash_prefill(
    q: Array, k: Array, v: Array, q_pos: Array, k_pos: Array, q_segments: Array | None,
    k_segments: Array | None, *, scale: float, window: int | None, softcap: float | None,
    blocks: FlashBlocks | None = None, interpret: Any = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Run the kernels on the operands of `flash_prefill`."""
    b, n, t, h = q.shape
    heads = k.shape[1]
    # Blocks are no longer than the operands: short chunks and short caches are padded.
    filled = [jnp.pad(x, ((0, 0), (0, 0), (0, max(0, LANES - x.shape[2])), (0, 0))) for x in (q, k, v)]
    grouped = filled[0].reshape(b, heads, n // heads, -1, h)
    q_rows, k_rows = [q_pos[:, None]], [k_pos]
    if q_segments is not None and k_segments is not None:
        q_rows.append(q_segments[:, None])
        k_rows.append(jnp.broadcast_to(k_segments[:, None], k_pos.shape))
    rows = (jnp.concatenate(q_rows, 1), jnp.stack(k_rows, 2).reshape(-1, len(k_rows), k_pos.shape[2]))
    size = blocks or default_blocks(q, k, v)
    call = _Call(size, scale, window, softcap, interpret)
    out, lse = _attend(call, grouped, *filled[1:], *rows)  # pyright: ignore[reportGeneralTypeIssues]
    return out[:, :, :, :t].reshape(b, n, t, -1), lse[..., :t].reshape(b, n, t)


class _Call(NamedTuple):
    """The static arguments of a call."""

    blocks: FlashBlocks
    scale: float
    window: int | None
    softcap: float | None
    interpret: Any

    def prepared(
        self, q: Array, k: Array, rows: tuple[Array, Array], *, back: bool
    ) -> tuple[Sizes, *tuple[Array, ...]]:
        """Block sizes, no longer than the operands, and rows padded to whole blocks with invisible ones."""
        limits = (q.shape[3], k.shape[2])
        blocks = [
            min(x, y // LANES * LANES) for x, y in zip(self.blocks[2 * back :][:2], limits, strict=True)
        ]
        filled = (
            jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % block)), constant_values=-1)
            for x, block in zip(rows, blocks, strict=True)
        )
        return Sizes(*blocks, self.scale, self.window, self.softcap), *filled  # pyright: ignore[reportCallIssue]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, q: Array, k: Array, v: Array, q_rows: Array, k_rows: Array) -> tuple[Array, Array]:
    sizes, *rows = call.prepared(q, k, (q_rows, k_rows), back=False)
    return kernel_tpu.flash_prefill(q, k, v, *rows, sizes=sizes, interpret=call.interpret)


def _forward(call: _Call, *operands: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    out, lse = _attend(call, *operands)  # pyright: ignore[reportGeneralTypeIssues]
    return (out, lse), (*operands, out, lse)


def _backward(call: _Call, kept: tuple[Array, ...], cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    q, k, v, q_rows, k_rows, out, lse = kept
    d_out, d_lse = cotangents
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - d_lse
    sizes, *rows = call.prepared(q, k, (q_rows, k_rows), back=True)
    most = slots_in_vmem(sizes.kv, k.shape[3], v.shape[3]) // sizes.kv
    part = min(most, -(-k.shape[2] // sizes.kv))
    q_own, k_own = rows
    dq, dk, dv = backward_tpu.gradients(
        q, k, v, q_own, k_own, d_out, lse, delta, sizes=sizes, part=part, interpret=call.interpret
    )
    slots = k.shape[2]
    return dq.astype(q.dtype), dk[:, :, :slots], dv[:, :, :slots], None, None


_attend.defvjp(_forward, _backward)
