"""Tensor product attention: queries, keys and values as sums of few outer products of heads and channels."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.ops.attention import token_cache as cache
from kvjax.ops.attention.latent import turned
from kvjax.ops.attention.token_cache import QUERIES, Mask, Places, Segments, TokenCache
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.rope import Rope


def tpa(
    a_q: Float[Array, "B T H Rq"],
    b_q: Float[Array, "B T Rq K"],
    a_k: Float[Array, "B T H Rk"],
    b_k: Float[Array, "B T Rk K"],
    a_v: Float[Array, "B T H Rv"],
    b_v: Float[Array, "B T Rv V"],
    *,
    rope: Rope | None = None,
    initial_state: TokenCache | None = None,
    capacity: int | None = None,
    segments: Segments = None,
    mask: Mask = None,
    recurrent: bool = False,
    scale: float | None = None,
) -> tuple[Float[Array, "B T H V"], TokenCache]:
    """Causal attention of q = A_q B_q / Rq, k = A_k B_k / Rk, v = A_v B_v / Rv, factors of every token.

    TPA of T6 (Zhang et al., 2025, arXiv:2501.06425, section 3). Rotary embeddings turn the b factors only,
    which is the same as turning q and k; none where rope is None. As in the authors' code they turn
    backwards, (x c + y s, y c - x s) with pairs (i, i + K / 2); for q k' only the sign of the distance
    between tokens changes. scale is K^-0.5 unless given.

    The state keeps a_k, the rotated b_k, a_v and b_v, in promote(float32, input): (Rk + Rv) (H + K) numbers
    per token instead of 2 H K. Prefill multiplies them out, [B, S, H, K] for the time of the call. With
    recurrent=True it never does: the products B_q B_k' of ranks come first and A_q, A_k after them, p A_v
    first and B_v after it, one query at a time. Segments are apart and positions count from their start;
    tokens that mask leaves out are not kept. Room is that of `kvjax.ops.attention.token_cache`.

    >>> a, b = jnp.ones((1, 3, 4, 2)), jnp.ones((1, 3, 2, 6))
    >>> o, state = tpa(a, b, a, b, a, b, rope=Rope())
    >>> o.shape, sum(x.size for x in state.kept.values())  # (2 + 2) (4 + 6) for each of 3 tokens
    ((1, 3, 4, 6), 120)
    """
    dtype = wide(b_v)
    a_q, b_q, a_k, b_k, a_v, b_v = (x.astype(dtype) for x in (a_q, b_q, a_k, b_k, a_v, b_v))
    factor = b_q.shape[-1] ** -0.5 if scale is None else scale
    new = {"a_k": a_k, "b_k": b_k, "a_v": a_v, "b_v": b_v}
    slots = cache.room(new, initial_state, capacity)
    at = cache.places(slots, *cache.marks(a_q, segments, mask))
    if rope is not None:
        pos = (at.slot - at.first)[..., None]
        b_q, new["b_k"] = _backwards(b_q, pos, rope), _backwards(b_k, pos, rope)
    slots = cache.put(slots, new, at)
    if recurrent:
        out = _factorised(a_q, b_q, slots, at, factor)
    else:
        q = _heads(a_q, b_q)
        k, v = (_heads(slots.kept[a], slots.kept[b]) for a, b in (("a_k", "b_k"), ("a_v", "b_v")))

        def some(q: Array, at: Places) -> Array:
            return cache.attend(q, k, v, cache.seen(at, cache.stored(slots)), scale=factor)[0]

        out = cache.over_queries(some, q, at, QUERIES)
    return cache.checked(out, at.slot[..., None], slots.capacity), slots


def _backwards(b: Float[Array, "B T R K"], pos: Int[Array, "B T 1"], rope: Rope) -> Float[Array, "B T R K"]:
    x, y = jnp.split(b, 2, -1)
    return jnp.concatenate(turned(x, y, -pos, rope), -1)


def _heads(a: Float[Array, "B T H R"], b: Float[Array, "B T R K"]) -> Float[Array, "B T H K"]:
    """The factors multiplied out, mean over ranks."""
    return jnp.einsum("bthr,btrk->bthk", a, b) / a.shape[-1]


def _factorised(
    a_q: Float[Array, "B T H Rq"], b_q: Float[Array, "B T Rq K"], slots: TokenCache, at: Places, scale: float
) -> Float[Array, "B T H V"]:
    """Attention, one query at a time, without any product of the size of k or v."""
    a_k, b_k, a_v, b_v = (slots.kept[name] for name in ("a_k", "b_k", "a_v", "b_v"))
    factor = scale / (a_q.shape[-1] * a_k.shape[-1])

    def one(q: tuple[Array, Array], at: Places) -> Array:
        ranks = jnp.einsum("btik,bsjk->btsij", q[1], b_k)
        by_head = jnp.einsum("bthi,btsij->bthsj", q[0], ranks)
        scores = jnp.einsum("bthsj,bshj->bhts", by_head, a_k) * factor
        p, _ = cache.softmax(scores, cache.seen(at, cache.stored(slots)))
        weights = jnp.einsum("bhts,bshj->bthsj", p, a_v) / a_v.shape[-1]
        return jnp.einsum("bthsj,bsjv->bthv", weights, b_v)

    return cache.over_queries(one, (a_q, b_q), at, 1)
