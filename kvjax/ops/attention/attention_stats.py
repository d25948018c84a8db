"""Attention statistics: how much every key receives, from queries, keys and the attention's lse.

Methods that score slots by attention need one number per slot, not the attention map: H2O the sum over
all queries (arXiv:2306.14048), SnapKV the mean over the last ones (arXiv:2404.14469), TOVA the last query's
(arXiv:2401.06104), KVzip the maximum (arXiv:2505.23416). FlashAttention returns lse = log sum_j exp(s_j)
(arXiv:2205.14135), and p_ij = exp(s_ij - lse_i) needs no more: one pass over the keys, in blocks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.ops.attention.strips import STRIP
from kvjax.ops.attention.union import NEG_INF, Keys, logits
from kvjax.ops.base.dispatch import form
from kvjax.ops.base.dtypes import wide
from kvjax.pallas_kernels.attention_stats import kernel_tpu as tpu

STATISTICS = ("sum", "max", "squares", "count", "last_mean", "weighted")
WEIGHTED = ("last_mean", "weighted")
LANES = tpu.LANES
# Two numbers per block of keys are in scalar memory, which holds 1 MiB.
MOST_BLOCKS = 2**16
BLOCK_KEYS = 1024


def attention_stats(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    lse: Float[Array, "B N T"],
    q_pos: Int[Array, "B T"],
    k_pos: Int[Array, "B #K S"],
    bias: Float[Array, "B K S"] | None = None,
    *,
    want: tuple[str, ...],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    last: int | None = None,
    threshold: float | None = None,
    weights: Float[Array, "B T"] | None = None,
    per_head: bool = False,
    strip: int = STRIP,
    implementation: str | None = None,
) -> dict[str, Float[Array, "B X S"]]:
    """Statistics of p_ij = exp(s_ij - lse_i) for every key j, over the queries i that see it; else 0.

    want: any of "sum", "max", "squares" (sum of p^2), "count" (how often p > threshold), and one of
    "last_mean" (the mean over the last `last` queries of every row, or all if it has fewer) and "weighted"
    (the sum weighted by `weights` per query). X is K, and the query heads of a group count as more queries;
    with per_head, X is N. lse is over all keys that were attended to, so keys in several sets take one call
    each; where it is -inf, p is 0. Logits and visibility (-1: an empty slot, or no query) are those of
    `kvjax.ops.attention.union.logits`. Sums in promote(float32, q, k); gradients are zero.

    strip: how many queries the reference takes at a time.
    implementation: "reference", "tpu" or "tpu interpret"; None takes the kernel if it  can run. Raises
    NotImplementedError if a forced one cannot, ValueError for what does not fit.

    >>> zero, pos = jnp.zeros((1, 2, 2, 4)), jnp.arange(2, dtype=jnp.int32)[None]
    >>> lse = jnp.log(jnp.asarray([[[1.0, 2.0]] * 2]))  # equal logits: query i gives 1 / (i + 1) to each
    >>> found = attention_stats(zero, zero[:, :1], lse, pos, pos[:, None], want=("sum", "max"), scale=1.0)
    >>> found["sum"].round(2).tolist(), found["max"].round(2).tolist()
    ([[[3.0, 1.0]]], [[[1.0, 0.5]]])
    """
    _check(q, k, lse, want, last, threshold)
    if ("weighted" in want) != (weights is not None) or (weights is not None and last is not None):
        given = None if weights is None else list(weights.shape)
        raise ValueError(
            f"'weighted' goes with weights [B, T], and without 'last_mean', got want={want}, weights={given}"
        )
    why = refusal(q, k, len(want) * (q.shape[1] // k.shape[1] if per_head else 1))
    chosen = form("attention_stats", implementation, q, k, lse, tpu=why)
    options: dict[str, Any] = dict(
        want=want,
        scale=scale,
        window=window,
        softcap=softcap,
        threshold=threshold or 0.0,
        per_head=per_head,
    )
    # Statistics only rank slots. The kernel has no gradient, so the reference has none either.
    q, k, lse, bias, weights = jax.lax.stop_gradient((q, k, lse, bias, weights))
    weight = weights if last is None else _is_last(q_pos, last)
    if weight is not None and want == ("last_mean",):
        # Blocks of older queries are skipped.
        q_pos = jnp.where(weight, q_pos, -1)
    if chosen == "reference":
        found = _reference(q, k, lse, q_pos, k_pos, bias, weight, strip=strip, **options)
    else:
        found = tpu_attention_stats(
            q, k, lse, q_pos, k_pos, bias, weight, interpret=chosen != "tpu", **options
        )
    if weight is not None and last is not None:
        queries = jnp.maximum(weight.sum(-1), 1) * (1 if per_head else q.shape[1] // k.shape[1])
        found["last_mean"] = found["last_mean"] / queries[:, None, None].astype(found["last_mean"].dtype)
    return found


def refusal(q: Array, k: Array, sums: int = 1) -> str:
    """Why the TPU kernel cannot take these operands and `sums` numbers per slot; empty if it can."""
    for name, x in (("queries", q), ("keys", k)):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} of {x.dtype}, expected float32 or bfloat16"
    b, heads, slots, _ = k.shape
    blocks = b * heads * -(-slots // _keys(sums))
    if blocks > MOST_BLOCKS:
        return f"{blocks} blocks of keys, expected at most {MOST_BLOCKS}: split the batch"
    return ""


def _check(
    q: Array, k: Array, lse: Array, want: tuple[str, ...], last: int | None, threshold: float | None
) -> None:
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"expected KV heads that divide the query heads, got {k.shape[1]} and {q.shape[1]}")
    if not want or len(set(want)) != len(want) or set(want) - set(STATISTICS):
        raise ValueError(f"want must be some of {', '.join(STATISTICS)}, each once, got {want}")
    if ("last_mean" in want) != (last is not None) or (last is not None and last < 1):
        raise ValueError(f"'last_mean' and last >= 1 go together, got want={want} and last={last}")
    if ("count" in want) != (threshold is not None) or (threshold is not None and threshold < 0):
        raise ValueError(f"'count' and threshold >= 0 go together, got want={want} and threshold={threshold}")


def _is_last(q_pos: Int[Array, "B T"], last: int) -> Array:
    """Which queries [B, T] are among the last `last` real ones of their row."""
    live = q_pos >= 0
    from_here = jnp.cumsum(live[:, ::-1], axis=1)[:, ::-1]
    return live & (from_here <= last)


def _reference(
    q: Array, k: Array, lse: Array, q_pos: Array, k_pos: Array, bias: Array | None, weight: Array | None, *,
    want: tuple[str, ...], scale: float, window: int | None, softcap: float | None,
    threshold: float, per_head: bool, strip: int,
) -> dict[str, Array]:  # fmt: skip
    """`attention_stats` before the division of "last_mean", computed in strips of queries."""
    (b, n, t, _), dtype = q.shape, wide(q, k)
    q, k = q.astype(dtype), k.astype(dtype)
    keys = Keys(k, k, k_pos, bias)
    weight = jnp.ones(q_pos.shape, dtype) if weight is None else weight.astype(dtype)

    def strips(x: Array, axis: int, fill: int = 0) -> Array:
        size = min(strip, t)
        pad = [(0, -t % size if i == axis else 0) for i in range(x.ndim)]
        x = jnp.pad(x, pad, constant_values=fill)
        return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)

    def visit(found: dict[str, Array], at: tuple[Array, ...]) -> tuple[dict[str, Array], None]:
        q, lse, q_pos, weight = at
        z = logits(q, keys, q_pos, scale=scale, window=window, softcap=softcap).astype(dtype)
        base = lse.reshape(*z.shape[:4], 1).astype(dtype)
        p = jnp.where((z == NEG_INF) | (base == NEG_INF), 0.0, jnp.exp(z - base))
        over = (3,) if per_head else (2, 3)
        seen = {
            "sum": lambda: p.sum(over),
            "max": lambda: p.max(over),
            "squares": lambda: (p * p).sum(over),
            "count": lambda: (p > threshold).sum(over).astype(dtype),
            **dict.fromkeys(WEIGHTED, lambda: (p * weight[:, None, None, :, None]).sum(over)),
        }
        new = {name: seen[name]().reshape(b, -1, k.shape[2]) for name in want}
        return {s: (jnp.maximum if s == "max" else jnp.add)(found[s], x) for s, x in new.items()}, None

    zero = jnp.zeros((b, n if per_head else k.shape[1], k.shape[2]), dtype)
    parts = (strips(q, 2), strips(lse, 2), strips(q_pos, 1, -1), strips(weight, 1))
    return jax.lax.scan(visit, dict.fromkeys(want, zero), parts)[0]


def tpu_attention_stats(
    q: Array, k: Array, lse: Array, q_pos: Array, k_pos: Array, bias: Array | None, weight: Array | None, *,
    want: tuple[str, ...], scale: float, window: int | None, softcap: float | None,
    threshold: float, per_head: bool,
    block_rows: int = 1024, block_keys: int | None = None, interpret: Any = False,
) -> dict[str, Array]:  # fmt: skip
    """Run the kernel on the operands of `_reference`.

    block_rows: queries of all heads per step, with at least 128 of each head.
    """
    (b, n, t, h), (heads, slots) = q.shape, k.shape[1:3]
    group, lists = n // heads, b * heads
    # With few queries, those of all heads of a group are put into one row, unless heads are counted
    # separately.
    folded = group if not per_head and group * t <= block_rows else 1
    shape = (group // folded, folded * t)
    rows = min(max(block_rows // shape[0] // LANES, 1), -(-shape[1] // LANES)) * LANES
    keys = block_keys or _keys(len(want) * (group if per_head else 1))
    keys = min(keys, -(-slots // LANES) * LANES)

    def padded(x: Array, block: int, fill: Any) -> Array:
        """[..., X] as [I, 1, X padded to whole blocks]."""
        x = x.reshape(-1, 1, x.shape[-1])
        return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[-1] % block)), constant_values=fill)

    def row(x: Array, fill: Any) -> Array:
        return padded(jnp.tile(x, (1, folded)), rows, fill)

    asked, held = row(q_pos, -1), padded(k_pos, keys, -1)
    blocks = (x.reshape(x.shape[0], -1, size) for x, size in ((asked, rows), (held, keys)))
    first, final = visits(*(jnp.repeat(x, lists // x.shape[0], axis=0) for x in blocks), window)  # pyright: ignore[reportCallIssue]
    sizes = tpu.Sizes(want, keys, rows, group if per_head else 1, scale, window, softcap, threshold)
    found = tpu.attention_stats(
        q.reshape(lists, *shape, h), k.reshape(lists, slots, h),
        lse.astype(jnp.float32).reshape(lists, *shape), asked, held,
        row(weight.astype(jnp.float32), 0.0) if weight is not None else None,
        None if bias is None else padded(bias.astype(jnp.float32), keys, 0.0),
        first, final, sizes=sizes, interpret=interpret,
    )  # fmt: skip
    return {name: x.reshape(b, -1, slots) for name, x in zip(want, found, strict=True)}


def _keys(sums: int, scratch_bytes: int = 2**22) -> int:
    """Keys per block such that `sums` partial sums, one number per lane, take at most `scratch_bytes`."""
    blocks = scratch_bytes // (sums * LANES * LANES * 4)
    return min(max(blocks, 1) * LANES, BLOCK_KEYS)


def visits(
    q_pos: Int[Array, "I blocks rows"], k_pos: Int[Array, "I keys block"], window: int | None
) -> tuple[Int[Array, "I keys"], Int[Array, "I keys"]]:
    """Find the first and last block of queries that may see part of each block of keys; (1, 0): none."""
    newest, unseen = q_pos.max(-1)[:, None], jnp.iinfo(jnp.int32).max
    seen = jnp.where(k_pos < 0, unseen, k_pos).min(-1)[..., None] <= newest
    if window is not None:
        oldest = jnp.where(q_pos < 0, unseen, q_pos).min(-1)[:, None]
        seen &= k_pos.max(-1)[..., None] > oldest - window
    count = seen.shape[-1]
    first = jnp.where(seen.any(-1), seen.argmax(-1), 1).astype(jnp.int32)
    final = jnp.where(seen.any(-1), count - 1 - seen[..., ::-1].argmax(-1), 0).astype(jnp.int32)
    return first, final
