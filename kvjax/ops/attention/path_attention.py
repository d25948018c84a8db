"""PaTH attention: logits with a product of data-dependent reflections between key and query."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.ops.attention import token_cache as cache
from kvjax.ops.attention.forgetting import gates, put_and_attend
from kvjax.ops.attention.token_cache import CHUNK, Mask, Segments, TokenCache
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.solve import unit_lower_solve


def path_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    w: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    g: Float[Array, "B T H"] | None = None,
    *,
    initial_state: TokenCache | None = None,
    capacity: int | None = None,
    segments: Segments = None,
    mask: Mask = None,
    recurrent: bool = False,
    scale: float | None = None,
) -> tuple[Float[Array, "B T H V"], TokenCache]:
    """Logits scale (q_t' P_t .. P_{s+1} k_s + G_t - G_s) with P_l = I - beta_l w_l w_l', and softmax over v.

    PaTH (Yang et al., 2025, arXiv:2505.16381): w of unit length, beta in (0, 2). With log forget gates g <=
    0, G their running sum, it is PaTH-FoX; here, as in the authors' kernels, `scale` (K^-0.5 unless given)
    multiplies the gates too, which it does not in `forgetting_attention`.

    The state keeps v, `since` = G_T - G_s and the keys as the last token sees them, P_T .. P_{s+1} k_s, in
    promote(float32, input): every new token changes every kept key, so a decode step writes as much as it
    reads, and keys cannot be quantised. In chunks of C tokens the products are the compact form of the paper,
    two triangular solves of size C, and the keys change once per chunk: T S K work in all and no array beyond
    [C, S] and [S, K] per head, but a gradient stores the keys of every chunk. It works token by token with
    `recurrent`. Segments do not see each other (an older segment's keys in the state are meaningless); tokens
    that mask leaves out are not kept and reflect nothing. The number of slots is as in
    `kvjax.ops.attention.token_cache`.

    >>> e = jnp.eye(2)[:, None]  # w_1 turns the first key around, and w_0 comes before it
    >>> x = jnp.stack([e[0], e[0]])[None]
    >>> _, state = path_attention(x, x, x, jnp.stack([e[1], e[0]])[None], jnp.full((1, 2, 1), 2.0))
    >>> state.kept["k"][0, :, 0].tolist()
    [[-1.0, 0.0], [1.0, 0.0]]
    """
    dtype = wide(v)
    g = jnp.zeros(beta.shape, dtype) if g is None else g.astype(dtype)
    q, k, v, w, beta = (x.astype(dtype) for x in (q, k, v, w, beta))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    slots = cache.room({"k": k, "v": v, "since": g}, initial_state, capacity)

    def chunk(slots: TokenCache, tokens: tuple[Array, ...]) -> tuple[TokenCache, Array]:
        q, k, v, w, beta, g, fresh, real = tokens
        old = slots.kept
        beta = jnp.where(real[..., None], beta, 0.0).astype(dtype)
        path, within = compact(w, k, beta)
        turns = jnp.tril(cache.products(q, w))
        to_old = cache.products(q - cache.mix(turns, path), old["k"])
        to_new = cache.products(q, k) - jnp.einsum("bhti,bhis->bhts", turns, within)
        bias, aged, since = gates(old["since"], g, real)
        scores = (jnp.concatenate([to_old, to_new], -1) + bias) * factor
        at = cache.places(slots, fresh, real)
        p, _ = cache.softmax(scores, cache.seen_arriving(slots, at))
        out = cache.mix_both(p, old["v"], v)
        turned = old["k"] - cache.mix(cache.products(old["k"], path), w)
        k = k - jnp.einsum("bhis,bihk->bshk", within, w)
        slots = slots._replace(kept=old | {"k": turned, "since": aged})
        slots = cache.put(slots, {"k": k, "v": v, "since": since}, at)
        return slots, cache.checked(out, at.slot[..., None], slots.capacity)

    def token(slots: TokenCache, token: tuple[Array, ...]) -> tuple[TokenCache, Array]:
        """`chunk` of one token: it reflects older keys, is written, and then its query attends to all."""
        q, k, v, w, beta, g, fresh, real = token
        at, old = cache.places(slots, fresh, real), slots.kept
        beta = jnp.where(real[..., None], beta, 0.0).astype(dtype)
        along = jnp.moveaxis(cache.products(beta[..., None] * w, old["k"]), 3, 1)  # [B, S, H, 1]
        slots = slots._replace(kept=old | {"k": old["k"] - along * w})
        return put_and_attend(slots, q, k, v, g, at, factor, factor)

    tokens = (q, k, v, w, beta, g, *cache.marks(q, segments, mask))
    one = recurrent or q.shape[1] == 1
    return cache.by_chunks(token if one else chunk, slots, tokens, 1 if one else CHUNK)


def compact(
    w: Float[Array, "B C H K"], k: Float[Array, "B C H K"], beta: Float[Array, "B C H"]
) -> tuple[Float[Array, "B C H K"], Float[Array, "B H C C"]]:
    """(Y, X) with P_t .. P_1 = I - sum_{i<=t} w_i y_i' and P_t .. P_{s+1} k_s = k_s - sum_{i<=t} w_i X_is.

    (I + L) Y = beta W and (I + L) X = strictly lower beta W K', where L is the strictly lower part of beta W
    W' (the UT transform of arXiv:2505.16381 and arXiv:2406.06484).
    """
    scaled = beta[..., None] * w
    apart = jnp.tril(cache.products(scaled, w), -1)
    rest = jnp.concatenate([jnp.swapaxes(scaled, 1, 2), jnp.tril(cache.products(scaled, k), -1)], -1)
    solved = unit_lower_solve(apart, rest)
    return jnp.swapaxes(solved[..., : w.shape[-1]], 1, 2), solved[..., w.shape[-1] :]
