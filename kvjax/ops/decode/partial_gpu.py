"""Split decoding on a GPU: how KV heads are split for `pallas_kernels.partial_gpu`, and parts are merged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.ops.base.triton import unable

if TYPE_CHECKING:
    from kvjax.pallas_kernels.partial_gpu import Cut

NEG_INF = float("-inf")
MOST_QUERIES, SMALLEST = 64, 16
# About how many programs run: four fit each of the 132 processors of an H100 at once.
PROGRAMS = 512


def gpu_refusal(q: Array, heads: int, rows: dict[str, int]) -> str:
    """Why no GPU kernel can take these queries and rows of so many channels; empty if one can."""
    if why := unable():
        return why
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries of {q.dtype}, expected float32 or bfloat16"
    queries = q.shape[1] // heads * q.shape[2]
    if queries > MOST_QUERIES:
        return f"{queries} queries for each KV head, expected at most {MOST_QUERIES}"
    for name, width in rows.items():
        if width > 512:
            return f"{name} are {width} wide, expected at most 512"
    return ""


def power(width: int) -> int:
    """`width` rounded up to a power of two that matrix units accept."""
    return max(SMALLEST, 1 << (width - 1).bit_length())


def cut(
    q: Float[Array, "B N T H"], heads: int, units: int, width: int, *,
    block: int | None, programs: int | None, warps: int | None, stages: int,
) -> Cut:  # fmt: skip
    """How KV heads are cut into splits, each of which one program visits in steps.

    units: the most units of a head, in whatever a step counts (slots or rows of words); block: units per
    step; width: of the widest row. Arguments that are None are chosen here. block, programs, warps and stages
    change a result by no more than rounding.
    """
    from kvjax.pallas_kernels.partial_gpu import Cut

    b, n, t, _ = q.shape
    # float32 products are exact, so not computed by matrix units: they take more registers, hence shorter
    # steps.
    exact = q.dtype == jnp.float32
    block = block or (16 if width > 128 or exact else 32)
    steps = max(1, -(-units // block))
    blocks = max(1, -(-steps * b * heads // (programs or PROGRAMS)))
    return Cut(block, blocks, -(-steps // blocks), warps or (8 if exact else 4), stages, n // heads * t)


def asked(
    q: Float[Array, "B N T H"], q_pos: Int[Array, "B T"], heads: int, lanes: int
) -> tuple[Float[Array, "I R W"], Int[Array, "I R"]]:
    """Group queries and positions per KV head, padded with queries at position -1, which see nothing."""
    b, n, t, h = q.shape
    lists, queries = b * heads, n // heads * t
    pad = (0, power(queries) - queries)
    pos = jnp.broadcast_to(q_pos[:, None, None], (b, heads, n // heads, t)).reshape(lists, queries)
    return (
        jnp.pad(q.reshape(lists, queries, h), ((0, 0), pad, (0, lanes - h))),
        jnp.pad(pos.astype(jnp.int32), ((0, 0), pad), constant_values=-1),
    )


def merged(
    outs: Float[Array, "I C Q W"], lses: Float[Array, "I C R"], like: Float[Array, "B N T H"]
) -> tuple[Float[Array, "B N T W"], Float[Array, "B N T"]]:
    """Merge partial attentions along C, like `kvjax.ops.attention.union.merge`.

    like: the queries; their rows come first among the R.
    """
    b, n, t, _ = like.shape
    queries = b * n * t // outs.shape[0]
    lses = lses[:, :, :queries]
    top = lses.max(1, keepdims=True)
    top = jnp.where(top == NEG_INF, 0.0, top)
    w = jnp.exp(lses - top)
    total = w.sum(1)
    safe = jnp.where(total == 0.0, 1.0, total)
    out = (outs * w[..., None]).sum(1) / safe[..., None]
    lse = jnp.where(total == 0.0, NEG_INF, top[:, 0] + jnp.log(safe))
    return out.astype(like.dtype).reshape(b, n, t, -1), lse.reshape(b, n, t)


def mass_of(
    logits: Float[Array, "I Q P"], lse: Float[Array, "B N T"], lengths: Int[Array, "B K"], slots: int
) -> Float[Array, "B K S"]:
    """Compute the probability of every slot, summed over the queries of its KV head; 0 after the length."""
    lists = lengths.size
    base = jnp.where(lse == NEG_INF, 0.0, lse).reshape(lists, -1, 1)
    live = jnp.arange(slots)[None, None] < lengths.reshape(lists, 1, 1)
    found = jnp.where(live, jnp.exp(logits[:, :, :slots] - base), 0.0)
    return found.sum(1).reshape(*lengths.shape, slots)
