"""How a layer's projections meet keys: rotation, what the new tokens offer, and attention over both."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.models.mixer import AttentionLogits, Layer, Projected
from kvjax.ops.attention.prompt_attention import causal_attention
from kvjax.ops.attention.union import NEG_INF, Keys, logits, weigh
from kvjax.ops.base.rope import angles, rotate


def rotary(layer: Layer, x: Float[Array, "B X S H"], pos: Array, length: Int[Array, "B"]) -> Array:
    """x turned by the layer's RoPE; pos [B, S] or [B, X, S]."""
    pos = pos[:, None] if pos.ndim == 2 else pos
    cos, sin = angles(layer.rope, pos, x.shape[-1], length[:, None, None])
    return rotate(x, cos, sin, layer.rope.start)


def new_keys(
    layer: Layer, k: Float[Array, "B K T F"] | None, v: Float[Array, "B K T V"] | None, pos: Int[Array, "B T"]
) -> Keys:
    """What the new tokens offer: the layer's own rotated keys and values, or those of the layer it reads."""
    given = layer.given
    if given is not None:
        k, v = (given.k, given.v) if k is None else (k, given.v)
        # One position later, a key is hidden from its own token alone.
        pos = jnp.where(pos >= 0, pos + 1, -1) if given.above else pos
    assert k is not None
    return Keys(k, k[..., : layer.mixer.slots(layer.config).value] if v is None else v, pos[:, None])


def attend_new(
    layer: Layer,
    x: Projected,
    q: Float[Array, "B N T H"],
    new: Keys,
    past: Sequence[Keys],
    pos: Int[Array, "B T"],
    *,
    mass: str | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N T V"], tuple[Array, ...], AttentionLogits | None]:
    """Attention of a layer's rotated queries over `past` and the new tokens: (out, masses, logits to show).

    Masses come as (one per past set ..., the new tokens), in the heads that the layer stores.
    """
    sets, heads = [*past, new], new.k.shape[1]
    if x.expand is not None:
        q = x.expand.queries(q)
        sets = x.expand.sets(sets)
    extra = [] if x.extra is None else [x.extra]
    shown = None
    # A prefill that ends early has one query over keys that are not only its own.
    if layer.shows or layer.shown is not None or q.shape[2] != sets[-1].k.shape[2]:
        out, _, masses, shown = attend_at_once(layer, x, q, [*extra, *sets], pos, mass=mass)
    else:
        out, masses = causal_attention(
            q, sets[-1], (*extra, *sets[:-1]), pos, scale=layer.scale, window=layer.window,
            softcap=layer.config.attention_softcap, mass=mass, clip=layer.mixer.clip,
            implementation=implementation,
        )  # fmt: skip
    masses = masses[len(extra) :]
    if x.expand is not None:
        join = jnp.max if mass == "max" else jnp.sum
        masses = tuple(join(m.reshape(m.shape[0], heads, -1, m.shape[-1]), axis=2) for m in masses)
    return out, masses, shown


def attend_at_once(
    layer: Layer,
    x: Projected,
    q: Float[Array, "B N T H"],
    sets: Sequence[Keys],
    pos: Int[Array, "B T"],
    *,
    mass: str | None = None,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"], tuple[Array, ...], AttentionLogits]:
    """Attention by whole maps of logits, a layer's own or those it is shown: (out, lse, masses, logits)."""
    if layer.shown is None:
        softcap = layer.config.attention_softcap
        scores = [logits(q, s, pos, scale=layer.scale, window=layer.window, softcap=softcap) for s in sets]
    else:
        scores = [_rescored(x, z, q, s) for z, s in zip(layer.shown, sets, strict=True)]
    out, lse, masses = weigh(scores, sets, mass=mass, clip=layer.mixer.clip)
    return out.astype(q.dtype), lse, masses, tuple(z.reshape(*q.shape[:3], -1) for z in scores)


def _rescored(x: Projected, shown: Float[Array, "B N T S"], q: Array, keys: Keys) -> Array:
    """Another layer's logits as a mixer puts them right, hidden where they were: [B, K, G, T, S]."""
    assert x.rescore is not None
    hidden = jnp.isneginf(shown)
    scores = jnp.where(hidden, NEG_INF, x.rescore(jnp.where(hidden, 0.0, shown), q, keys.k))
    return scores.reshape(scores.shape[0], keys.v.shape[1], -1, *scores.shape[2:])
