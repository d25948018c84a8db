"""Attention over a union of key/value sets, decided by positions alone.

A key is visible to a query if its position is known (>= 0), not in the query's future and, under a
sliding window, not too old. No code here depends on which method arranged the keys or in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.ops.base.dtypes import wide

NEG_INF = float("-inf")


class Keys(NamedTuple):
    """One set of keys and values to attend to; slots in any order.

    `pos` is -1 for empty slots, and None for slots outside the sequence, which every query sees (sinks,
    learned keys). `bias` is added to the logits (log counts of merged slots); it has an axis of N query heads
    instead of K if it differs between the query heads of a group. Values of empty slots must be finite,
    because they are multiplied by zero. sizes: factors on the keys and on the values of every slot, if any;
    only `logits` and `weigh` take such sets. until: queries from these positions on do not see a slot. seen:
    which slots each query, or each of its heads, may see at all; only `logits` takes such sets.
    """

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S V"]
    pos: Int[Array, "B #K S"] | None
    bias: Float[Array, "B K S"] | Float[Array, "B N S"] | None = None
    sizes: tuple[Float[Array, "B K S"] | None, Float[Array, "B K S"] | None] = (None, None)
    until: Int[Array, "B #K S"] | None = None
    seen: Bool[Array, "B T S"] | Bool[Array, "B N T S"] | None = None


class Products(NamedTuple):
    """Products of queries and weights with keys and values that are computed from stored ones, unexpanded.

    keys: queries [B, N, T, H] and stored keys [B, K, S, F] to their products [B, N, T, S]. values: weights
    [B, N, T, S] and stored values [B, K, S, F] to weighted sums [B, N, T, V]. Both give float32 or wider.
    """

    keys: Callable[[Array, Array], Array]
    values: Callable[[Array, Array], Array]


class Reduction(NamedTuple):
    """How the probabilities that a slot receives are reduced to one number, over queries and a group's heads.

    kind: "sum", "max", "squares" (the sum of p^2) or "count" (how often p > threshold). fade: in a sum, every
    query weighs fade^(number of newer queries in its row).
    """

    kind: str = "sum"
    threshold: float = 0.0
    fade: float = 1.0

    def of(
        self, p: Float[Array, "B K G T S"], newer: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B K S"]:
        """Compute the number of every slot, from the probabilities of some queries.

        newer: how many queries of a row are newer than each; None for one query per row.
        """
        if self.kind == "max":
            return p.max((2, 3))
        if self.fade != 1.0 and newer is not None:
            weight = jnp.power(jnp.asarray(self.fade, p.dtype), newer.astype(p.dtype))
            return (p * weight[:, None, None, :, None]).sum((2, 3))
        each = {
            "sum": lambda: p,
            "squares": lambda: p * p,
            "count": lambda: (p > self.threshold).astype(p.dtype),
        }
        return each[self.kind]().sum((2, 3))

    def join(self, a: Array, b: Array) -> Array:
        """Join the numbers of two sets of queries."""
        return jnp.maximum(a, b) if self.kind == "max" else a + b

    def over(self, x: Array, axis: int) -> Array:
        """Join the numbers of the query sets along an axis."""
        return x.max(axis) if self.kind == "max" else x.sum(axis)


def newer_queries(q_pos: Int[Array, "B T"], mass: tuple[Reduction, ...]) -> Int[Array, "B T"] | None:
    """How many queries of a row are newer than each; None if no recorded mass decays.

    Queries must be in token order; those with position -1 do not count.
    """
    if all(one.fade == 1.0 for one in mass):
        return None
    live = (q_pos >= 0).astype(jnp.int32)
    return jnp.cumsum(live[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1] - live


# What slots received, one [B, K, S] array for each reduction.
Masses = tuple[Float[Array, "_ _ _"], ...]


def visible(
    q_pos: Int[Array, "B T"], k_pos: Int[Array, "B K S"] | None, window: int | None = None,
    until: Int[Array, "B _ S"] | None = None,
) -> Array:  # fmt: skip
    """Boolean mask [B, K, T, S]: which key each query may see. Queries with position -1 see nothing."""
    q = q_pos[:, None, :, None]
    if k_pos is None:
        return q >= 0
    k = k_pos[:, :, None, :]
    seen = (k >= 0) & (k <= q)
    seen = seen if until is None else seen & (q < until[:, :, None, :])
    return seen if window is None else seen & (k > q - window)


def logits(
    q: Float[Array, "B N T H"],
    keys: Keys,
    q_pos: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    products: Products | None = None,
) -> Float[Array, "B K G T S"]:
    """Masked attention logits in promote(float32, q), -inf for invisible keys.

    `softcap` is Gemma 2's c * tanh(s / c) (arXiv:2408.00118), applied before the bias and the mask. products:
    given if the set holds what keys are computed from; K is then the number of KV heads that are stored, and
    G the query heads of each.
    """
    b, n, t, h = q.shape
    kv_heads = keys.k.shape[1]
    rows = q.reshape(b, kv_heads, n // kv_heads * t, h)
    s = scale * (_products(rows, keys.k) if products is None else products.keys(q, keys.k))
    s = s.reshape(b, kv_heads, n // kv_heads, t, -1)
    if keys.sizes[0] is not None:
        s = s * keys.sizes[0][:, :, None, None].astype(s.dtype)
    if softcap is not None:
        s = softcap * jnp.tanh(s / softcap)
    if keys.bias is not None:
        s = s + keys.bias.reshape(b, kv_heads, -1, 1, keys.bias.shape[-1])
    seen = visible(q_pos, keys.pos, window, keys.until)[:, :, None]
    if keys.seen is not None:
        own = keys.seen[:, None] if keys.seen.ndim == 3 else keys.seen
        seen = seen & own.reshape(b, *((kv_heads, -1) if own.shape[1] > 1 else (1, 1)), *own.shape[2:])
    return jnp.where(seen, s, NEG_INF)


def _products(rows: Float[Array, "B K R H"], k: Float[Array, "B K S H"]) -> Float[Array, "B K R S"]:
    """Compute q k' in promote(float32, q).

    With few rows XLA on CPU reads keys a fifth faster as the left operand.
    """
    if rows.shape[2] > 8:
        return jnp.einsum("bkrh,bksh->bkrs", rows, k, preferred_element_type=wide(rows))
    return jnp.swapaxes(jnp.einsum("bksh,bkrh->bksr", k, rows, preferred_element_type=wide(rows)), 2, 3)


def attend(
    q: Float[Array, "B N T H"],
    keys: Keys | Sequence[Keys],
    q_pos: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    mass: tuple[Reduction, ...] = (),
    clip: tuple[float, float] | None = None,
    newer: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"], tuple[Masses, ...]]:
    """Exact attention over the union of `keys`; returns (out, lse, masses).

    out = sum_j p_j v_j with p = softmax over every visible key of every set; lse = log sum_j exp(s_j),
    -inf (and out 0) if a query sees nothing. `mass`, `clip` and `newer` are those of `weigh`.
    """
    sets = (keys,) if isinstance(keys, Keys) else tuple(keys)
    scores = [logits(q, s, q_pos, scale=scale, window=window, softcap=softcap) for s in sets]
    out, lse, masses = weigh(scores, sets, mass=mass, clip=clip, newer=newer)
    return out.astype(q.dtype), lse, masses


def weigh(
    scores: Sequence[Float[Array, "B _ _ T _"]],
    sets: Sequence[Keys],
    *,
    mass: tuple[Reduction, ...] = (),
    clip: tuple[float, float] | None = None,
    newer: Int[Array, "B T"] | None = None,
    products: Products | None = None,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"], tuple[Masses, ...]]:
    """Values of several sets weighted by the softmax over all their scores: (out, lse, masses).

    scores: logits [B, K, G, T, S] of each set, -inf for invisible keys. `mass`: the reductions for which
    `Masses` of every set are returned: the probability that each slot received, reduced over the queries and
    the heads of its group; it costs no second pass over the keys. newer: `newer_queries`, for reductions that
    decay. clip = (gamma, zeta) replaces probabilities by clip((zeta - gamma) p + gamma, 0, 1), the clipped
    softmax of arXiv:2306.12929; such parts cannot be merged.
    """
    b, k, g, t, _ = scores[0].shape
    n = k * g
    # Sets may differ in their number of KV heads (a method may store slots per query head), so the normaliser
    # has the shape [B, N, T].
    top = jnp.stack([s.max(-1).reshape(b, n, t) for s in scores]).max(0)
    top = jax.lax.stop_gradient(jnp.where(top == NEG_INF, 0.0, top))
    weights = [jnp.exp(s - _grouped(top, s)) for s in scores]
    total = jnp.stack([w.sum(-1).reshape(b, n, t) for w in weights]).sum(0)
    safe = jnp.where(total == 0.0, 1.0, total)
    norm = safe
    if clip is not None:
        gamma, zeta = clip
        weights = [jnp.clip((zeta - gamma) * (w / _grouped(safe, w)) + gamma, 0.0, 1.0) for w in weights]
        norm = jnp.ones_like(safe)
    each = [_weighted_values(w, s, (b, n, t), products) for w, s in zip(weights, sets, strict=True)]
    out = reduce(jnp.add, each)
    masses: tuple[Masses, ...] = ()
    if mass:
        shares = [w / _grouped(norm, w) for w in weights]
        masses = tuple(tuple(reduction.of(p, newer) for reduction in mass) for p in shares)
    return out / norm[..., None], _log_total(top, total, safe), masses


def _grouped(x: Array, like: Array) -> Array:
    """[B, N, T] seen as [B, K, G, T, 1] of `like`."""
    return x.reshape(*like.shape[:4], 1)


def _log_total(top: Array, total: Array, safe: Array) -> Array:
    # The log of the safe total keeps the gradient finite if a query sees nothing.
    return jnp.where(total == 0.0, NEG_INF, top + jnp.log(safe))


def _weighted_values(
    p: Float[Array, "B K G T S"], keys: Keys, bnt: tuple[int, int, int], products: Products | None
) -> Array:
    """sum_j p_j v_j as [B, N, T, V]."""
    b, k, g, t, s = p.shape
    if keys.sizes[1] is not None:
        p = p * keys.sizes[1][:, :, None, None].astype(p.dtype)
    if products is not None:
        return products.values(p.reshape(*bnt, s), keys.v)
    weights = p.reshape(b, k, g * t, s).astype(keys.v.dtype)
    out = jnp.einsum("bkts,bksv->bktv", weights, keys.v, preferred_element_type=wide(keys.v))
    return out.reshape(*bnt, -1)


def merge(
    parts: Sequence[tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]],
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:
    """Exact union of partial attentions from their (out, lse) pairs.

    out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i) (FlashAttention, arXiv:2205.14135).
    """
    lse = jnp.stack([p[1] for p in parts])
    top = lse.max(0)
    # stop_gradient: the max cancels in the result. Without it, a compiler may compute an lse twice with
    # different last bits, no term equals the max, and the gradient is 0 / 0.
    top = jax.lax.stop_gradient(jnp.where(top == NEG_INF, 0.0, top))
    w = jnp.exp(lse - top[None])
    total = w.sum(0)
    safe = jnp.where(total == 0.0, 1.0, total)
    w = w / safe[None]
    out = reduce(jnp.add, [wi[..., None] * o.astype(wide(o)) for wi, (o, _) in zip(w, parts, strict=True)])
    return out.astype(parts[0][0].dtype), _log_total(top, total, safe)
