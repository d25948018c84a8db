"""Multi-head latent attention: one small latent per token serves as the keys and values of all heads."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.ops.attention import token_cache as cache
from kvjax.ops.attention.token_cache import QUERIES, Mask, Places, Segments, TokenCache
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.rope import Rope


def turned(
    a: Float[Array, "*s h"], b: Float[Array, "*s h"], pos: Int[Array, "*#s"], rope: Rope
) -> tuple[Float[Array, "*s h"], Float[Array, "*s h"]]:
    """Pairs (a, b) turned by pos * frequency, in the dtype of a, for every layout of pairs.

    A `rope` that depends on data, or that turns some channels only, raises ValueError.

    >>> one = jnp.ones((1, 1))
    >>> x, y = turned(one, 0 * one, jnp.ones(1, jnp.int32), Rope())
    >>> round(x.item(), 4), round(y.item(), 4)
    (0.5403, 0.8415)
    """
    channels = 2 * a.shape[-1]
    if rope.kind == "dynamic":
        raise ValueError("rope kind dynamic depends on the length of a row: rotate q and k before the call")
    if rope.turning(channels) != channels:
        raise ValueError(
            f"rope turns {rope.turning(channels)} of {channels} channels: give None or all of them"
        )
    frequency = jnp.asarray(rope.frequencies(channels), a.dtype)
    angle = pos[..., None].astype(a.dtype) * frequency.reshape((1,) * pos.ndim + (-1,))
    cos, sin = jnp.cos(angle) * rope.amplitude, jnp.sin(angle) * rope.amplitude
    return a * cos - b * sin, a * sin + b * cos


def interleaved(x: Float[Array, "*s P"], pos: Int[Array, "*#s"], rope: Rope) -> Float[Array, "*s P"]:
    """x turned in pairs of neighbours (2i, 2i + 1), as in RoFormer (arXiv:2104.09864) and DeepSeek.

    `kvjax.ops.base.rope.rotate` pairs i with i + P / 2 instead.

    >>> x = jnp.asarray([[1.0, 0.0, 1.0, 0.0]])
    >>> [round(y, 4) for y in interleaved(x, jnp.ones(1, jnp.int32), Rope(theta=100.0))[0].tolist()]
    [0.5403, 0.8415, 0.995, 0.0998]
    """
    pairs = turned(x[..., 0::2], x[..., 1::2], pos, rope)
    return jnp.stack(pairs, -1).reshape(x.shape)


def mla(
    q: Float[Array, "B T H K"],
    q_rope: Float[Array, "B T H P"],
    latent: Float[Array, "B T R"],
    k_rope: Float[Array, "B T P"],
    up_k: Float[Array, "R H K"],
    up_v: Float[Array, "R H V"],
    *,
    rope: Rope | None = None,
    initial_state: TokenCache | None = None,
    capacity: int | None = None,
    segments: Segments = None,
    mask: Mask = None,
    recurrent: bool = False,
    scale: float | None = None,
) -> tuple[Float[Array, "B T H V"], TokenCache]:
    """softmax(scale (q_h' up_k_h' c_s + rot(q_rope_h)' rot(k_rope_s))) up_v_h' c_s, with latents c.

    MLA of DeepSeek-V2 (DeepSeek-AI, 2024, arXiv:2405.04434, section 2.1 and appendix C). `latent` comes as
    it is cached, after its norm; q_rope and k_rope come unrotated and turn by `interleaved` at their
    position in the segment, not at all where rope is None (NoPE, as in Kimi Linear). scale is (K + P)^-0.5
    unless given; YaRN models multiply it by their own factor.

    The state keeps `latent` [B, S, R] and the rotated `rope` key [B, S, P], shared by all heads, in
    promote(float32, input). Prefill *expands* it: keys up_k' c and values up_v' c of all heads,
    [B, S, H, K + P] and [B, S, H, V] for the time of the call. With recurrent=True the maps are *absorbed*,
    q up_k' and then up_v of the result: attention of H query heads over one key head of R + P channels,
    whose values are the latent, one query at a time. The same numbers in another order, so in bfloat16 the
    two would round differently.

    Segments are apart; tokens that mask leaves out are not kept. Room is that of
    `kvjax.ops.attention.token_cache`.

    >>> x, up = jnp.ones((1, 3, 2, 4)), jnp.ones((5, 2, 4))
    >>> o, state = mla(x, x, jnp.ones((1, 3, 5)), x[:, :, 0], up, up, rope=Rope())
    >>> o.shape, state.kept["latent"].shape, state.kept["rope"].shape
    ((1, 3, 2, 4), (1, 3, 5), (1, 3, 4))
    """
    dtype = wide(latent)
    q, q_rope, latent, k_rope = (x.astype(dtype) for x in (q, q_rope, latent, k_rope))
    up_k, up_v = up_k.astype(dtype), up_v.astype(dtype)
    factor = (q.shape[-1] + q_rope.shape[-1]) ** -0.5 if scale is None else scale
    slots = cache.room({"latent": latent, "rope": k_rope}, initial_state, capacity)
    at = cache.places(slots, *cache.marks(latent, segments, mask))
    if rope is not None:
        pos = at.slot - at.first
        q_rope, k_rope = interleaved(q_rope, pos[..., None], rope), interleaved(k_rope, pos, rope)
    slots = cache.put(slots, {"latent": latent, "rope": k_rope}, at)
    c, shared = slots.kept["latent"], slots.kept["rope"][:, :, None]
    if recurrent:
        q, k, v = jnp.einsum("bthk,rhk->bthr", q, up_k), c[:, :, None], c[:, :, None]
    else:
        k, v = jnp.einsum("bsr,rhk->bshk", c, up_k), jnp.einsum("bsr,rhv->bshv", c, up_v)
        shared = jnp.broadcast_to(shared, (*k.shape[:3], shared.shape[-1]))
    q, k = jnp.concatenate([q, q_rope], -1), jnp.concatenate([k, shared], -1)

    def some(q: Array, at: Places) -> Array:
        return cache.attend(q, k, v, cache.seen(at, cache.stored(slots)), scale=factor)[0]

    out = cache.over_queries(some, q, at, 1 if recurrent else QUERIES)
    out = jnp.einsum("bthr,rhv->bthv", out, up_v) if recurrent else out
    return cache.checked(out, at.slot[..., None], slots.capacity), slots
