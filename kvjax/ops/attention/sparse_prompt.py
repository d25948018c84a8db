"""Attention of a first prompt's queries to picked blocks of its keys: by a kernel, or in plain jnp."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.ops.attention.block_sparse import Picks, block_attention, column_attention, in_order
from kvjax.ops.attention.union import Keys, merge
from kvjax.ops.base.dispatch import form
from kvjax.ops.base.triton import unable
from kvjax.pallas_kernels.sparse_prompt import kernel_tpu

KINDS = (jnp.float32, jnp.bfloat16)
LANES = 128
# Keys of a tile on a TPU; bytes of a segment's queries, results and sums; numbers in scalar memory.
TILE, SEGMENT_BYTES, COUNTS = 512, 2**24, 2**16


class Options(NamedTuple):
    """The logits' parameters."""

    scale: float
    softcap: float | None


def sparse_prompt(
    q: Float[Array, "B N T H"], keys: Keys, q_pos: Int[Array, "B T"], picks: Picks, *,
    scale: float, softcap: float | None = None, implementation: str | None = None,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:  # fmt: skip
    """Return (out, lse) of a first prompt's queries over the keys that were picked for their segments.

    Queries and keys of a token have the same index, in the order of their positions, and those of padding, at
    -1, follow all others; `block_attention` has the definition. Kernels compare indices with the rows'
    lengths, and read and compute picked blocks alone; single columns are attended to in plain jnp.

    implementation: "reference", "tpu", "gpu", "tpu interpret" or "gpu interpret"; None takes a kernel where
    it can run. Raises NotImplementedError if a forced one cannot. There is no reverse gradient.

    >>> x, pos = jnp.ones((1, 1, 32, 16)), jnp.where(jnp.arange(32) < 20, jnp.arange(32), -1)[None]
    >>> picks = Picks(jnp.asarray([[[[True, False], [False, True]]]]))
    >>> _, lse = sparse_prompt(
    ...     x, Keys(x, x, pos[:, None]), pos, picks, scale=0.0, implementation="gpu interpret"
    ... )
    >>> jnp.exp(lse)[0, 0, jnp.asarray([0, 15, 16, 19, 20])].round().tolist()
    [1.0, 16.0, 1.0, 4.0, 0.0]
    """
    why = dict(tpu=tpu_refusal(q, keys, picks), gpu=gpu_refusal(q, keys, picks))
    chosen = form("sparse_prompt", implementation, q, keys, picks, **why)
    options: dict[str, Any] = dict(scale=scale, softcap=softcap)
    if chosen == "reference":
        return block_attention(q, keys, q_pos, picks, **options)
    lengths = (q_pos >= 0).sum(-1, dtype=jnp.int32)
    call = tpu_sparse_prompt if chosen.startswith("tpu") else gpu_sparse_prompt
    own = Options(scale, softcap)
    found = call(q, keys.k, keys.v, lengths, picks.blocks, own, interpret=chosen.endswith("interpret"))
    if picks.columns is None:
        return found
    return merge([found, column_attention(q, keys, q_pos, picks, **options)])


def _refusal(q: Array, keys: Keys, picks: Picks) -> str:
    """Why no kernel can take these operands; empty if both can."""
    if any(x.dtype not in KINDS for x in (q, keys.k, keys.v)):
        return f"q, k and v of {q.dtype}, {keys.k.dtype} and {keys.v.dtype}, expected float32 or bfloat16"
    sizes = _sizes(q, picks)
    if any(size % 16 for size in sizes):
        return f"segments of {sizes[0]} queries and blocks of {sizes[1]} keys, expected multiples of 16"
    return ""


def tpu_refusal(q: Array, keys: Keys, picks: Picks) -> str:
    """Why the TPU kernel cannot take these operands; empty if it can."""
    segment, block = _sizes(q, picks)
    if why := _refusal(q, keys, picks):
        return why
    if LANES % block and block % LANES or block > 2 * TILE:
        return f"blocks of {block} keys, expected a divisor or a multiple of {LANES} up to {2 * TILE}"
    group, width = q.shape[1] // picks.blocks.shape[1], max(q.shape[3], keys.v.shape[3])
    if 4 * group * segment * (2 * LANES + 3 * width) > SEGMENT_BYTES:
        return f"segments of {segment} queries of {group} heads, which exceed a TPU's vector memory"
    if picks.blocks[..., 0].size > COUNTS:
        return f"{picks.blocks[..., 0].size} segments of all heads, whose counts exceed the scalar memory"
    return ""


def gpu_refusal(q: Array, keys: Keys, picks: Picks) -> str:
    """Why the GPU kernel cannot take these operands; empty if it can."""
    if max(q.shape[3], keys.v.shape[3]) > 256:
        return f"rows {q.shape[3]} and {keys.v.shape[3]} wide, expected at most 256"
    return _refusal(q, keys, picks) or unable()


def _sizes(q: Array, picks: Picks) -> tuple[int, int]:
    """Count queries per segment and keys per block."""
    return q.shape[2] // picks.blocks.shape[2], q.shape[2] // picks.blocks.shape[3]


def tpu_sparse_prompt(
    q: Array, k: Array, v: Array, lengths: Array, blocks: Array, options: Options, *, interpret: Any = False
) -> tuple[Array, Array]:
    """Run the TPU kernel on queries, keys, values, tokens of each row [B] and picks [B, P, I, J]."""
    b, n, t, h = q.shape
    lists, i, j = blocks.shape[1:]
    segment, block, width = t // i, t // j, v.shape[3]
    together = max(1, TILE // block)
    # Copies by hand take whole lanes.
    q, k, v = (jnp.pad(x, (*((0, 0),) * 3, (0, -x.shape[3] % LANES))) for x in (q, k, v))
    order, counts = in_order(blocks)
    order = jnp.pad(order, (*((0, 0),) * 3, (0, -j % together))).reshape(b * lists * i, 1, -1)
    out, lse = kernel_tpu.sparse_prompt(
        q.reshape(b, lists, n // lists, t, -1), k, v, order, counts.reshape(-1), jnp.repeat(lengths, lists),
        sizes=kernel_tpu.Sizes(segment, block, together, *options), interpret=interpret,
    )  # fmt: skip
    return out.reshape(b, n, t, -1)[..., :width], jnp.swapaxes(lse, 2, 3).reshape(b, n, t)


def gpu_sparse_prompt(
    q: Array, k: Array, v: Array, lengths: Array, blocks: Array, options: Options, *, interpret: bool = False
) -> tuple[Array, Array]:
    """Run the GPU kernel on the operands of `tpu_sparse_prompt`."""
    from kvjax.pallas_kernels.sparse_prompt import kernel_gpu

    lists, i, j = blocks.shape[1:]
    segment, block = q.shape[2] // i, q.shape[2] // j
    order, counts = (x.reshape(-1, *x.shape[2:]) for x in in_order(blocks))
    wide = max(q.shape[3], v.shape[3]) > LANES
    # Exact products of float32 take more registers.
    exact = q.dtype == jnp.float32
    most = (32, 16) if exact else (64, 32) if wide else (128, 64)
    rows, keys = (min(x & -x, limit) for x, limit in zip((segment, block), most, strict=True))
    sizes = kernel_gpu.Sizes(segment, block, *options, rows, keys, 8 if exact or rows == 128 else 4, 2)
    return kernel_gpu.sparse_prompt(
        q, k, v, order, counts, jnp.repeat(lengths, lists), sizes=sizes, interpret=interpret
    )
