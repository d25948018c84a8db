"""DeltaFormer: attention over values from which what the memory already predicts is subtracted."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.ops.attention import token_cache as cache
from kvjax.ops.attention.token_cache import CHUNK, Mask, Segments, TokenCache
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.solve import unit_lower_solve


def deltaformer(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    *,
    r: Float[Array, "B T H K"] | None = None,
    initial_state: TokenCache | None = None,
    capacity: int | None = None,
    segments: Segments = None,
    mask: Mask = None,
    recurrent: bool = False,
    scale: float | None = None,
) -> tuple[Float[Array, "B T H V"], TokenCache]:
    """u_t = v_t - beta_t sum_{s<t} p_ts u_s, then o_t = softmax_{s<=t}(scale q_t k_s) u.

    p_t is the softmax of scale r_t k_s over s < t, and scale is K^-0.5 unless given. DeltaFormer (Zhong et
    al., 2025, arXiv:2505.19488), as in flash-linear-attention, whose op has r = q (also here, unless given)
    and whose layer has r = k; beta scales what is subtracted.

    The state keeps k and u in promote(float32, input); v itself is not needed again. u depends on all of its
    past, a triangular system of T equations per head. It is solved forward in chunks: what older chunks hold
    is subtracted, and what remains is a system of C equations, so the largest arrays are [C, S] per head,
    not [T, T]; a gradient keeps the state of every chunk. Token by token where `recurrent`. Segments are
    apart; tokens that mask leaves out are not kept. Room is that of `kvjax.ops.attention.token_cache`.

    >>> x = jnp.ones((1, 2, 1, 1))
    >>> o, state = deltaformer(x, x, 3 * x, x[..., 0])
    >>> state.kept["u"].ravel().tolist(), o.ravel().tolist()
    ([3.0, 0.0], [3.0, 1.5])
    """
    dtype = wide(v)
    apart, r = r is not None, q if r is None else r
    q, k, v, beta, r = (x.astype(dtype) for x in (q, k, v, beta, r))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    slots = cache.room({"k": k, "u": v}, initial_state, capacity)

    def chunk(slots: TokenCache, tokens: tuple[Array, ...]) -> tuple[TokenCache, Array]:
        q, k, v, beta, r, fresh, real = tokens
        old, size, c = slots.kept, slots.capacity, q.shape[1]
        at = cache.places(slots, fresh, real)
        scores = jnp.concatenate([cache.products(q, old["k"]), cache.products(q, k)], -1) * factor
        visible = cache.seen_arriving(slots, at)
        earlier = jnp.concatenate([jnp.ones((c, size), bool), jnp.tril(jnp.ones((c, c), bool), -1)], -1)
        held = scores
        if apart:
            held = jnp.concatenate([cache.products(r, old["k"]), cache.products(r, k)], -1) * factor
        p, _ = cache.softmax(held, visible & earlier[None, None])
        p = p * jnp.swapaxes(beta, 1, 2)[..., None]
        rest = jnp.swapaxes(v - cache.mix(p[..., :size], old["u"]), 1, 2)
        u = jnp.swapaxes(unit_lower_solve(p[..., size:], rest), 1, 2)
        p, _ = cache.softmax(scores, visible)
        out = cache.mix_both(p, old["u"], u)
        return cache.put(slots, {"k": k, "u": u}, at), cache.checked(out, at.slot[..., None], size)

    def token(slots: TokenCache, token: tuple[Array, ...]) -> tuple[TokenCache, Array]:
        """`chunk` of one token, whose key is written first, so that slots are read in place."""
        q, k, v, beta, r, fresh, real = token
        at = cache.places(slots, fresh, real)
        slots = cache.put(slots, {"k": k}, at)
        number = cache.stored(slots)
        visible, own = cache.seen(at, number), number[:, None] == at.slot[..., None]
        scores = cache.products(q, slots.kept["k"]) * factor
        held = cache.products(r, slots.kept["k"]) * factor if apart else scores
        p, _ = cache.softmax(held, visible & ~own[:, None])
        u = v - beta[..., None] * cache.mix(p, slots.kept["u"])
        slots = cache.put(slots, {"u": u}, at)
        p, _ = cache.softmax(scores, visible)
        out = cache.mix(p, slots.kept["u"])
        return slots, cache.checked(out, at.slot[..., None], slots.capacity)

    tokens = (q, k, v, beta, r, *cache.marks(q, segments, mask))
    one = recurrent or q.shape[1] == 1
    return cache.by_chunks(token if one else chunk, slots, tokens, 1 if one else CHUNK)
