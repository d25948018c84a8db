"""Attention over a union of key/value sets, decided by positions alone.

A key is visible to a query when its position is known (>= 0), not in the query's future and, under a
sliding window, not too old. Nothing here asks which method arranged the keys or in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.ops.dtypes import wide

NEG_INF = float("-inf")


class Keys(NamedTuple):
    """One set of keys and values to attend to; slots in any order.

    `pos` is -1 where a slot is empty, and None for slots outside the sequence, which every query sees (sinks,
    learned keys). `bias` is added to the logits (log counts of merged slots). Values of empty slots must be
    finite, because they are multiplied by zero and not left out.
    """

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S V"]
    pos: Int[Array, "B #K S"] | None
    bias: Float[Array, "B K S"] | None = None


def visible(q_pos: Int[Array, "B T"], k_pos: Int[Array, "B K S"] | None, window: int | None = None) -> Array:
    """Boolean mask [B, K, T, S]: which key each query may see. Queries with position -1 see nothing."""
    q = q_pos[:, None, :, None]
    if k_pos is None:
        return q >= 0
    k = k_pos[:, :, None, :]
    seen = (k >= 0) & (k <= q)
    return seen if window is None else seen & (k > q - window)


def logits(
    q: Float[Array, "B N T H"],
    keys: Keys,
    q_pos: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "B K G T S"]:
    """Masked attention logits in promote(float32, q), -inf where a key is not visible.

    `softcap` is Gemma 2's c * tanh(s / c) (arXiv:2408.00118), applied before the bias and the mask.
    """
    b, n, t, h = q.shape
    kv_heads = keys.k.shape[1]
    rows = q.reshape(b, kv_heads, n // kv_heads * t, h)
    s = _products(rows, keys.k) * scale
    s = s.reshape(b, kv_heads, n // kv_heads, t, -1)
    if softcap is not None:
        s = softcap * jnp.tanh(s / softcap)
    if keys.bias is not None:
        s = s + keys.bias[:, :, None, None, :]
    return jnp.where(visible(q_pos, keys.pos, window)[:, :, None], s, NEG_INF)


def _products(rows: Float[Array, "B K R H"], k: Float[Array, "B K S H"]) -> Float[Array, "B K R S"]:
    """q k' in promote(float32, q). With few rows XLA on CPU reads keys a fifth faster as the left operand."""
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
    mass: str | None = None,
    clip: tuple[float, float] | None = None,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"], tuple[Array, ...]]:
    """Exact attention over the union of `keys`; returns (out, lse, masses).

    out = sum_j p_j v_j with p = softmax over every visible key of every set; lse = log sum_j exp(s_j),
    -inf (and out 0) where a query sees nothing. `mass` and `clip` are those of `weigh`.
    """
    sets = (keys,) if isinstance(keys, Keys) else tuple(keys)
    scores = [logits(q, s, q_pos, scale=scale, window=window, softcap=softcap) for s in sets]
    out, lse, masses = weigh(scores, sets, mass=mass, clip=clip)
    return out.astype(q.dtype), lse, masses


def weigh(
    scores: Sequence[Float[Array, "B _ _ T _"]],
    sets: Sequence[Keys],
    *,
    mass: str | None = None,
    clip: tuple[float, float] | None = None,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"], tuple[Array, ...]]:
    """Values of several sets weighted by the softmax over all their scores: (out, lse, masses).

    scores: logits [B, K, G, T, S] of each set, -inf where a key is not visible. `mass` asks for one [B, K, S]
    array per set: the probability that each slot received, reduced over the queries and the heads of its
    group by "sum" or "max"; it costs no second pass over the keys. clip = (gamma, zeta) makes probabilities
    clip((zeta - gamma) p + gamma, 0, 1), the clipped softmax of arXiv:2306.12929; such parts do not merge.
    """
    b, k, g, t, _ = scores[0].shape
    n = k * g
    # Sets may differ in their number of KV heads (a method may store one slot list per query head), so
    # the normaliser lives at [B, N, T].
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
    out = _sum([_weighted_values(w, s, (b, n, t)) for w, s in zip(weights, sets, strict=True)])
    masses = ()
    if mass is not None:
        over = {"sum": jnp.sum, "max": jnp.max}[mass]
        masses = tuple(over(w / _grouped(norm, w), axis=(2, 3)) for w in weights)
    return out / norm[..., None], _log_total(top, total, safe), masses


def _sum(xs: Sequence[Array]) -> Array:
    return reduce(jnp.add, xs)


def _grouped(x: Array, like: Array) -> Array:
    """[B, N, T] seen as [B, K, G, T, 1] of `like`."""
    return x.reshape(*like.shape[:4], 1)


def _log_total(top: Array, total: Array, safe: Array) -> Array:
    # log of the safe total keeps the gradient finite where a query sees nothing.
    return jnp.where(total == 0.0, NEG_INF, top + jnp.log(safe))


def _weighted_values(p: Float[Array, "B K G T S"], keys: Keys, bnt: tuple[int, int, int]) -> Array:
    """sum_j p_j v_j as [B, N, T, V]."""
    b, k, g, t, s = p.shape
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
    top = jnp.where(top == NEG_INF, 0.0, top)
    w = jnp.exp(lse - top[None])
    total = w.sum(0)
    safe = jnp.where(total == 0.0, 1.0, total)
    w = w / safe[None]
    out = _sum([wi[..., None] * o.astype(wide(o)) for wi, (o, _) in zip(w, parts, strict=True)])
    return out.astype(parts[0][0].dtype), _log_total(top, total, safe)


# Queries per strip, and how many different key prefixes a long prompt is cut into: each prefix is compiled
# apart and its strips run in a loop, so more prefixes skip more of the causal half and compile longer.
STRIP = 256
PREFIXES = 8
REMAT_FROM = 1024
# Beyond so many bytes of scores, a CPU works one KV head at a time: what stays in its cache is faster. Other
# devices take all heads at once, which may lie on several of them.
CACHED_BYTES = 2**24


def causal_attention(
    q: Float[Array, "B N T H"],
    new: Keys,
    past: Sequence[Keys],
    q_pos: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    mass: str | None = None,
    clip: tuple[float, float] | None = None,
) -> tuple[Float[Array, "B N T V"], tuple[Array, ...]]:
    """Attention of T new tokens over `past` sets and over themselves; returns (out, masses).

    Works in strips of queries, so no [T, T] map exists, and a strip hardly touches the new keys behind its
    last row: the causal half is skipped. Masses come as (one per past set ..., the new set). The new keys
    must lie in the order of the queries.
    """
    whole = partial(_in_strips, scale=scale, window=window, softcap=softcap, mass=mass, clip=clip)
    b, n, t, _ = q.shape
    heads, slots = new.k.shape[1], t + sum(s.k.shape[2] for s in past)
    if heads == 1 or jax.default_backend() != "cpu" or 4 * b * n * min(t, STRIP) * slots < CACHED_BYTES:
        return whole(q, new, past, q_pos)

    def split(x: Array) -> Array:
        per_head = x.reshape(b, heads, -1, *x.shape[2:]) if x.shape[1] >= heads else x[:, None]
        return jnp.moveaxis(jnp.broadcast_to(per_head, (b, heads, *per_head.shape[2:])), 1, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(b, -1, *x.shape[3:])

    def one(part: tuple[Array, Keys, tuple[Keys, ...]]) -> tuple[Array, tuple[Array, ...]]:
        return whole(part[0], part[1], part[2], q_pos)

    parts = jax.tree.map(split, (q, new, tuple(past)))
    return jax.tree.map(join, jax.lax.map(one, parts))


def _in_strips(
    q: Float[Array, "B N T H"],
    new: Keys,
    past: Sequence[Keys],
    q_pos: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    mass: str | None,
    clip: tuple[float, float] | None,
) -> tuple[Float[Array, "B N T V"], tuple[Array, ...]]:
    """`causal_attention` of all heads at once."""
    t = q.shape[2]
    join = jnp.maximum if mass == "max" else jnp.add
    part = -(-t // (PREFIXES * STRIP)) * STRIP
    outs, total = [], None
    for start in range(0, t, part):
        stop = min(start + part, t)
        # Right padding keeps positions increasing along a row, so older strips hide nothing newer.
        first = 0 if window is None else max(0, start - window + 1)
        seen = jax.tree.map(lambda x, a=first, z=stop: x[:, :, a:z], new)

        # A gradient recomputes the probabilities, or a long prompt would keep its whole [T, T] map.
        @(jax.checkpoint if t >= REMAT_FROM else lambda f: f)
        def strip(at: tuple[Array, Array], seen: Keys = seen) -> tuple[Array, tuple[Array, ...]]:
            sets = (*past, seen)
            out, _, masses = attend(
                at[0], sets, at[1], scale=scale, window=window, softcap=softcap, mass=mass, clip=clip
            )
            return out, masses

        out, masses = _by_strips(strip, q[:, :, start:stop], q_pos[:, start:stop], join)
        outs.append(out)
        if mass is not None:
            here = jnp.zeros((*new.k.shape[:2], t), masses[-1].dtype).at[:, :, first:stop].set(masses[-1])
            masses = (*masses[:-1], here)
            total = masses if total is None else tuple(map(join, total, masses))
    return jnp.concatenate(outs, axis=2), total or ()


def _by_strips(
    strip: Callable[[tuple[Array, Array]], tuple[Array, tuple[Array, ...]]],
    q: Float[Array, "B N T H"],
    q_pos: Int[Array, "B T"],
    join: Callable[[Array, Array], Array],
) -> tuple[Float[Array, "B N T V"], tuple[Array, ...]]:
    """strip over every STRIP queries, masses joined; a remainder that is not a whole strip goes at once."""
    b, n, t, h = q.shape
    if t <= STRIP or t % STRIP:
        return strip((q, q_pos))
    rows = jnp.moveaxis(q.reshape(b, n, t // STRIP, STRIP, h), 2, 0)
    pos = jnp.moveaxis(q_pos.reshape(b, t // STRIP, STRIP), 1, 0)
    shapes = jax.eval_shape(strip, (rows[0], pos[0]))[1]

    def body(masses: tuple[Array, ...], at: tuple[Array, Array]) -> tuple[tuple[Array, ...], Array]:
        out, new = strip(at)
        return tuple(map(join, masses, new)), out

    # Masses are never negative, so zero starts a sum and a maximum alike.
    zero = tuple(jnp.zeros(m.shape, m.dtype) for m in shapes)
    masses, outs = jax.lax.scan(body, zero, (rows, pos))
    return jnp.moveaxis(outs, 0, 2).reshape(b, n, t, -1), masses


def attend_to_all(
    q: Float[Array, "B N T H"],
    sets: Sequence[Keys],
    q_pos: Int[Array, "B T"],
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B N T V"]:
    """Attention of T tokens over every live key of `sets`, later ones too; 0 where there is none.

    Works in strips of queries, so no [T, S] map exists. Queries with position -1 see nothing.
    """
    t = q.shape[2]
    # A key at position 0 is in no query's future.
    sets = [s if s.pos is None else s._replace(pos=jnp.minimum(s.pos, 0)) for s in sets]

    @(jax.checkpoint if t >= REMAT_FROM else lambda f: f)
    def strip(at: tuple[Array, Array]) -> tuple[Array, tuple[Array, ...]]:
        return attend(at[0], sets, at[1], scale=scale, softcap=softcap)[0], ()

    whole = t - t % STRIP
    cuts = [(a, z) for a, z in ((0, whole), (whole, t)) if a < z]
    return jnp.concatenate(
        [_by_strips(strip, q[:, :, a:z], q_pos[:, a:z], jnp.add)[0] for a, z in cuts], axis=2
    )
