"""Forgetting attention: softmax attention whose logits decay by learned gates."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.ops.attention import token_cache as cache
from kvjax.ops.attention.token_cache import CHUNK, Mask, Segments, TokenCache
from kvjax.ops.base.dtypes import wide


def forgetting_attention(
    q: Float[Array, "B T N K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T N"],
    *,
    initial_state: TokenCache | None = None,
    capacity: int | None = None,
    segments: Segments = None,
    mask: Mask = None,
    recurrent: bool = False,
    scale: float | None = None,
) -> tuple[Float[Array, "B T N V"], TokenCache]:
    """softmax(scale q_t k_s + G_t - G_s) v, where G is the running sum of log forget gates g <= 0.

    The Forgetting Transformer (FoX; Lin, Nikishin, He & Courville, 2025, arXiv:2503.02130), with a gate per
    query head, g = log sigmoid(w x + b). scale is K^-0.5 unless given. It works in chunks, or token by token
    with `recurrent`; chunks of queries read all slots, including those hidden by causality. The state keeps
    k, v and `since` = G_T - G_s, how much each slot has decayed since, in promote(float32, input); its number
    of slots is as in `kvjax.ops.attention.token_cache`. Segments do not see each other; tokens that mask
    leaves out are not kept and decay nothing.

    e^G_t cancels in the softmax, so a decoding step is ordinary attention with a bias per slot, which
    `kvjax.ops.attention.union.Keys.bias` carries. -G_s would do as the bias and never changes, but it grows
    without bound while float32 has 7 digits: at |G| = 10^4 logits are off by 10^-3, whatever is subtracted
    later. `since` is exact where it matters, because what is large in it is forgotten. It costs one addition
    per slot and step.

    >>> x = jnp.ones((1, 3, 1, 1))
    >>> v = jnp.asarray([1.0, 2.0, 4.0]).reshape(1, 3, 1, 1)
    >>> o, _ = forgetting_attention(x, x, v, jnp.full((1, 3, 1), jnp.log(0.5)))
    >>> [round(x, 4) for x in o.ravel().tolist()]  # (1/2 1 + 2) / 1.5, (1/4 1 + 1/2 2 + 4) / 1.75
    [1.0, 1.6667, 3.0]
    """
    dtype = wide(v)
    q, k, v, g = (x.astype(dtype) for x in (q, k, v, g))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    slots = cache.room({"k": k, "v": v, "since": g}, initial_state, capacity)

    def chunk(slots: TokenCache, tokens: tuple[Array, ...]) -> tuple[TokenCache, Array]:
        q, k, v, g, fresh, real = tokens
        old = slots.kept
        at = cache.places(slots, fresh, real)
        bias, aged, since = gates(old["since"], g, real)
        scores = jnp.concatenate([cache.products(q, old["k"]), cache.products(q, k)], -1) * factor + bias
        p, _ = cache.softmax(scores, cache.seen_arriving(slots, at))
        out = cache.mix_both(p, old["v"], v)
        slots = slots._replace(kept=old | {"since": aged})
        slots = cache.put(slots, {"k": k, "v": v, "since": since}, at)
        return slots, cache.checked(out, at.slot[..., None], slots.capacity)

    def token(slots: TokenCache, token: tuple[Array, ...]) -> tuple[TokenCache, Array]:
        """`chunk` of one token, which is written first, so that slots are read once and in place."""
        q, k, v, g, fresh, real = token
        return put_and_attend(slots, q, k, v, g, cache.places(slots, fresh, real), factor, 1.0)

    tokens = (q, k, v, g, *cache.marks(q, segments, mask))
    one = recurrent or q.shape[1] == 1
    return cache.by_chunks(token if one else chunk, slots, tokens, 1 if one else CHUNK)


def put_and_attend(
    slots: TokenCache,
    q: Float[Array, "B 1 N K"],
    k: Float[Array, "B 1 H K"],
    v: Float[Array, "B 1 H V"],
    g: Float[Array, "B 1 N"],
    at: cache.Places,
    scale: float,
    gate_scale: float,
) -> tuple[TokenCache, Float[Array, "B 1 N V"]]:
    """Write one token into slots, whose decay its gate updates, and attend to all slots.

    Logits are scale q k' + gate_scale `since`.
    """
    aged = slots.kept["since"] + jnp.where(at.real[..., None], g, 0).astype(g.dtype)
    aging = slots._replace(kept=slots.kept | {"since": aged})
    slots = cache.put(aging, {"k": k, "v": v, "since": jnp.zeros_like(g)}, at)
    bias = jnp.moveaxis(slots.kept["since"], 1, 2)[:, :, None] * gate_scale
    visible = cache.seen(at, cache.stored(slots))
    out, _ = cache.attend(q, slots.kept["k"], slots.kept["v"], visible, scale=scale, bias=bias)
    return slots, cache.checked(out, at.slot[..., None], slots.capacity)


def gates(
    since: Float[Array, "B S N"], g: Float[Array, "B C N"], real: Bool[Array, "B C"]
) -> tuple[Float[Array, "B N C SC"], Float[Array, "B S N"], Float[Array, "B C N"]]:
    """(G_t - G_s for the C tokens of a chunk over S slots and over themselves, `since` of both at its end).

    Every number is a sum of gates of one sign, and never a difference of two such sums, so no digits are
    lost.
    """
    c = g.shape[1]
    g = jnp.where(real[..., None], g, 0).astype(g.dtype)
    total = jnp.cumsum(g, 1)
    later = jnp.tril(jnp.ones((c, c), bool), -1)[None, None]
    within = jnp.cumsum(jnp.where(later, jnp.moveaxis(g, 1, 2)[..., None], 0).astype(g.dtype), 2)
    before = jnp.moveaxis(since, 1, 2)[:, :, None] + jnp.moveaxis(total, 1, 2)[..., None]
    return jnp.concatenate([before, within], -1), since + total[:, -1:], jnp.moveaxis(within[:, :, -1], 1, 2)
