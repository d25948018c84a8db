"""Attention of a layer: rotation, the keys and values of new tokens, and attention over them and the past."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.mesh.on_mesh import OnMesh
from kvjax.models.attending_picked import attend_picked
from kvjax.models.mixer import AttentionLogits, GroupState, Layer, LayerSlots, Left, Projected
from kvjax.models.picking import all_of
from kvjax.ops.attention.in_common import for_rows
from kvjax.ops.attention.prompt_attention import causal_attention, past_attention
from kvjax.ops.attention.split_tokens import split_attention
from kvjax.ops.attention.union import (
    NEG_INF,
    Keys,
    Masses,
    Products,
    Reduction,
    logits,
    merge,
    newer_queries,
    weigh,
)
from kvjax.ops.attention.whole_rows import attend_whole_rows, can_run
from kvjax.ops.base.dispatch import kernels_may_run
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.rope import Rope, angles, rotate


def rotated(rope: Rope, x: Float[Array, "B X S H"], pos: Array, length: Int[Array, "B"]) -> Array:
    """Rotate x by a RoPE; pos [B, S] or [B, X, S]."""
    pos = pos[:, None] if pos.ndim == 2 else pos
    cos, sin = angles(rope, pos, x.shape[-1], length[:, None, None], dtype=wide(x))
    return rotate(x, cos, sin, rope.start)


def new_keys(
    layer: Layer, k: Float[Array, "B K T F"] | None, v: Float[Array, "B K T V"] | None, pos: Int[Array, "B T"]
) -> Keys:
    """Keys and values of the new tokens: the layer's own rotated ones, or those taken from another."""
    slots, values = layer.taken.get("slots"), layer.taken.get("slot values")
    if slots is not None:
        k, v = slots.k, slots.v
        # Shifted by one position, a key is hidden only from its own token.
        pos = jnp.where(pos >= 0, pos + 1, -1) if slots.above else pos
    if values is not None:
        v = values.v
    assert k is not None
    return Keys(k, k[..., : layer.slots.value] if v is None else v, pos[:, None])


def published_by(
    layer: Layer,
    state: GroupState,
    k: Float[Array, "B K S F"] | None,
    v: Float[Array, "B K S V"] | None,
    scores: AttentionLogits | None,
) -> Left:
    """Return the slots and logits that a layer publishes after attention, if other layers take them."""
    both = {"slots": LayerSlots(state, k, v), "logits": scores}
    return {name: thing for name, thing in both.items() if name in layer.publishes}


def attend_new(
    layer: Layer,
    x: Projected,
    q: Float[Array, "B N T H"],
    new: Keys,
    past: Sequence[Keys],
    pos: Int[Array, "B T"],
    more: Sequence[tuple[Array, Array]] = (),
    *,
    mass: tuple[Reduction, ...] = (),
    in_order: bool = True,
    in_places: bool = False,
    implementation: str | None = None,
    on: OnMesh | None = None,
) -> tuple[Float[Array, "B N T V"], tuple[Masses, ...], AttentionLogits | None]:
    """Attention of a layer's rotated queries over `past` and the new tokens: (out, masses, logits).

    past sets with fewer rows are shared by rows. more: (out, lse) of parts attended elsewhere, which are
    merged into the output. Masses come as (one per past set ..., the new tokens), in the heads that the layer
    stores; logits only if the layer publishes them. in_order: as of `attend_sets`; in_places: whether the new
    tokens have consecutive positions, followed by padding; on: as of `causal_attention`.
    """
    if (
        in_places
        and kernels_may_run(implementation)
        and not (past or more or mass)
        and (x.picking is None or x.picking.alike([new]))
    ):
        out = _whole_rows(layer, x, q, new, implementation, on)
        if out is not None:
            return out, (), None
    out, lse, masses, scores = attend_sets(
        layer, x, q, new, past, pos, mass=mass, in_order=in_order, implementation=implementation, on=on
    )
    if more:
        out = merge([(out, lse), *more])[0]
    return out, masses, scores


def _whole_rows(
    layer: Layer, x: Projected, q: Float[Array, "B N T H"], new: Keys, implementation: str | None,
    on: OnMesh | None,
) -> Float[Array, "B N T V"] | None:  # fmt: skip
    """Attention of new tokens to themselves alone, if a library's kernel can compute it; else None."""
    slots = layer.taken.get("slots")
    shares = "logits" in layer.publishes or "logits" in layer.taken or (slots is not None and slots.above)
    plain = layer.mixer.clip is None and not layer.mixer.chunked and not layer.config.attention_softcap
    if shares or x.extra is not None or not plain:
        return None
    if x.expand is not None:
        q, (new,) = x.expand.queries(q), x.expand.sets([new])
    if new.bias is not None or (on is not None and on.token_axes(q.shape[2])):
        return None
    if not can_run(q, new.k, new.v, layer.window, implementation, on):
        return None
    return attend_whole_rows(q, new.k, new.v, scale=layer.scale, window=layer.window, on=on)


def in_chunks(layer: Layer, sets: Sequence[Keys], pos: Int[Array, "B T"]) -> tuple[list[Keys], Array]:
    """Keys and queries at positions by which a window of C tokens starts anew at every multiple of C.

    Chunk c then begins at 2 c C, so that a window of C tokens holds none of the chunk before it. Those of
    other layers stay as they are.
    """
    size = layer.window
    assert size is not None

    def spread(pos: Array) -> Array:
        return jnp.where(pos >= 0, pos + size * (pos // size), pos)

    return [s if s.pos is None else s._replace(pos=spread(s.pos)) for s in sets], spread(pos)


def attend_sets(
    layer: Layer,
    x: Projected,
    q: Float[Array, "B N T H"],
    new: Keys,
    past: Sequence[Keys],
    pos: Int[Array, "B T"],
    *,
    mass: tuple[Reduction, ...] = (),
    in_order: bool = True,
    implementation: str | None = None,
    on: OnMesh | None = None,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"], tuple[Masses, ...], AttentionLogits | None]:
    """`attend_new` as one part of a union: (out, lse, masses, logits).

    in_order: whether every query has the index of its own key or a smaller one, so that later keys and those
    outside its window may be skipped. on: if its rules split the tokens, devices exchange keys as
    `split_attention` says.
    """
    if layer.mixer.chunked:
        (*past, new), pos = in_chunks(layer, [*past, new], pos)
    sets, heads, rows = [*past, new], new.k.shape[1], q.shape[0]
    if x.picking is not None:
        if not x.picking.alike(sets):
            how: dict[str, Any] = dict(scale=layer.scale, window=layer.window)
            how |= dict(softcap=layer.config.attention_softcap)
            out, lse, masses = attend_picked(x, q, [for_rows(s, rows) for s in sets], pos, mass, **how)
            return out, lse, _of_lists(mass, masses, heads), None
        x.picking.leave(all_of([s.pos for s in sets if s.pos is not None], rows))
    shares = "logits" in layer.publishes or "logits" in layer.taken
    if mass or shares or layer.mixer.clip is not None or (x.expand is not None and x.expand.rows is not None):
        # Such sets are attended to jointly, or computed from each other.
        sets = [for_rows(keys, rows) for keys in sets]
    q = q if x.expand is None else x.expand.queries(q)
    extra, scores = [] if x.extra is None else [x.extra], None
    options: dict[str, Any] = dict(
        scale=layer.scale, window=layer.window, softcap=layer.config.attention_softcap,
        implementation=implementation,
    )  # fmt: skip
    # A prefill that ends early has one query over keys of other tokens, too.
    at_once = shares or not in_order or q.shape[2] != new.k.shape[2]
    if on is not None and not at_once and on.token_axes(q.shape[2]):
        sets = [for_rows(keys, rows) for keys in sets]
        out, lse, masses = _apart(layer, x, q, sets, pos, mass=mass, on=on, **options)
        return out, lse, masses if x.expand is None else _of_lists(mass, masses, heads), None
    if x.expand is not None:
        sets = x.expand.sets(sets)
    common = [keys for keys in sets if keys.k.shape[0] != rows]
    sets = [keys for keys in sets if keys.k.shape[0] == rows]
    if at_once:
        out, lse, masses, scores = attend_at_once(layer, x, q, [*extra, *sets], pos, mass=mass)
    else:
        out, lse, masses = causal_attention(
            q, sets[-1], (*extra, *sets[:-1]), pos, mass=mass, clip=layer.mixer.clip, on=on, **options
        )
    if common:
        out, lse = merge([(out, lse), *(past_attention(q, keys, pos, **options) for keys in common)])
    masses = masses[len(extra) :]
    return out, lse, masses if x.expand is None else _of_lists(mass, masses, heads), scores


def _apart(
    layer: Layer, x: Projected, q: Float[Array, "B N T H"], sets: Sequence[Keys], pos: Int[Array, "B T"], *,
    on: OnMesh, **options: Any,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"], tuple[Masses, ...]]:  # fmt: skip
    """Attention with tokens split over devices: stored slots are sent, and expanded there if possible."""
    expand, mine = x.expand, layer.slots
    if expand is not None and expand.rows is not None:
        sets, expand = expand.sets(sets), None
    options |= dict(extra=() if x.extra is None else (x.extra,), clip=layer.mixer.clip)
    if expand is None:
        derived = x.expand is None and mine.shared and "slot values" not in layer.taken
        return split_attention(
            q, sets[-1], sets[:-1], pos, on=on, shared=mine.value if derived else 0, **options
        )

    def one(keys: Keys) -> Keys:
        return expand.sets([keys])[0]

    shared = mine.value if mine.shared else 0
    return split_attention(q, sets[-1], sets[:-1], pos, on=on, expand=one, shared=shared, **options)


def _of_lists(mass: tuple[Reduction, ...], masses: tuple[Masses, ...], heads: int) -> tuple[Masses, ...]:
    return tuple(in_lists(mass, of_set, heads) for of_set in masses)


def in_lists(mass: tuple[Reduction, ...], masses: Masses, heads: int) -> Masses:
    """Masses per query head reduced to the `heads` KV heads that a layer stores."""
    return tuple(
        one.over(m.reshape(m.shape[0], heads, -1, m.shape[-1]), 2)
        for one, m in zip(mass, masses, strict=True)
    )


def attend_at_once(
    layer: Layer,
    x: Projected,
    q: Float[Array, "B N T H"],
    sets: Sequence[Keys],
    pos: Int[Array, "B T"],
    *,
    mass: tuple[Reduction, ...] = (),
    products: Products | None = None,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"], tuple[Masses, ...], AttentionLogits]:
    """Attention by whole maps of logits, the layer's own or taken ones: (out, lse, masses, logits).

    products: as of `logits`, for all sets.
    """
    taken = layer.taken.get("logits")
    if taken is None:
        options: dict[str, Any] = dict(scale=layer.scale, window=layer.window, products=products)
        options |= dict(softcap=layer.config.attention_softcap)
        scores = [logits(q, s, pos, **options) for s in sets]
    else:
        scores = [_rescored(x, z, q, s) for z, s in zip(taken, sets, strict=True)]
    newer = newer_queries(pos, mass)
    out, lse, masses = weigh(scores, sets, mass=mass, clip=layer.mixer.clip, newer=newer, products=products)
    return out.astype(q.dtype), lse, masses, tuple(z.reshape(*q.shape[:3], -1) for z in scores)


def _rescored(x: Projected, taken: Float[Array, "B N T S"], q: Array, keys: Keys) -> Array:
    """Compute the mixer's logits from another layer's, -inf where those are: [B, K, G, T, S]."""
    assert x.rescore is not None
    hidden = jnp.isneginf(taken)
    scores = jnp.where(hidden, NEG_INF, x.rescore(jnp.where(hidden, 0.0, taken), q, keys.k))
    return scores.reshape(scores.shape[0], keys.v.shape[1], -1, *scores.shape[2:])
