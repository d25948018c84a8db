"""Select: the union of old and new slots, their scores, and which of them stay.

How the slots of one layer are ranked and merged is in `kvjax.compress.selection`. Nothing here moves a slot;
`kvjax.compress.segments` does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.compress.group import GroupMethod
from kvjax.compress.selection import folded, grown, judged, ranked
from kvjax.grammar import Keep
from kvjax.grammar.calls import scored, shaped, written
from kvjax.grammar.fitted import of_layer
from kvjax.grammar.kinds import AttentionSpec, Observed, Preferring, SelectionTrace, View, over_layers
from kvjax.keep.select import top
from kvjax.models.stacking import Group, in_group_order, in_layer_order
from kvjax.state.cache import GroupState, Pages, Segment, Slots
from kvjax.state.page_gather import gather_pages, gather_traces

# (a layer's parameters, its stored keys and values, their positions) -> keys and values as queries meet them.
AsMet = Callable[[dict[str, Array], Array, Array, Array], tuple[Array, Array]]


class ComputedTokens(NamedTuple):
    """What the layers of a group computed for new tokens: stored keys and values, and observations.

    v is None if values are not stored (`GroupMethod.shared`). masses: attention received by the slots of
    (each past part ..., the new tokens), by the key of the mass; empty if not needed. traces: the initial
    traces of the new tokens' slots, by key. readers: the observations of other layers that read these slots;
    masses include theirs. k is None in those layers themselves. rows: what rows carry after the new tokens,
    by the key of the observation.
    """

    k: Float[Array, "Lg B K T H"] | None
    v: Float[Array, "Lg B K T V"] | None
    observed: dict[str, Any]
    masses: tuple[dict[str, Float[Array, "Lg _ _ _"]], ...]
    traces: dict[str, Float[Array, "Lg B K T"]]
    readers: tuple[dict[str, Any], ...] = ()
    rows: dict[str, Any] = {}  # noqa: RUF012 (never written to)


def union(
    gm: GroupMethod, past: GroupState, pools: tuple[Pages, ...], fresh: ComputedTokens, pos: Int[Array, "B T"]
) -> View:
    """All slots of a group, old and new, decoded and in position order, empty ones last: [Lg, B, K, S, ...].

    Traces include what each slot received from the new queries. If the keep's merge writes biases, every slot
    has one.
    """
    assert fresh.k is not None
    layers, b, heads, t, _ = fresh.k.shape
    new_pos = jnp.broadcast_to(pos[None, :, None], (layers, b, heads, t))
    values = fresh.k[..., : gm.shared] if fresh.v is None else fresh.v
    views = [_decoded(s, pools) for s in past.parts]
    views.append(View(fresh.k, values, new_pos, None, fresh.traces))
    views = [
        w._replace(traces=grown(gm.traces, w.traces, seen), received=seen)
        for w, seen in zip(views, fresh.masses or [{}] * len(views), strict=True)
    ]
    merge = None if gm.keep is None else gm.keep.merge
    if "bias" in written(merge) or any(w.bias is not None for w in views):
        views = [w._replace(bias=jnp.zeros(w.pos.shape, jnp.float32)) if w.bias is None else w for w in views]
    if len(views) == 1:
        return views[0]
    both = jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=3), *views)
    # In position order, because smoothing uses neighbours, granules are filled in order, and ties keep the
    # older token.
    order = jnp.argsort(jnp.where(both.pos < 0, jnp.iinfo(jnp.int32).max, both.pos), axis=3, stable=True)
    return jax.tree.map(
        lambda x: jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 4)), axis=3), both
    )


def in_first_tier(
    gm: GroupMethod, past: GroupState, pools: tuple[Pages, ...], view: View, tokens: int
) -> Bool[Array, "Lg B K S"]:
    """Find the live slots of a view outside the past's second tier; positions are below `tokens`."""
    live = view.pos >= 0
    if gm.keep is None or gm.keep.lower is None:
        return live
    below = _decoded(past.bodies[-1], pools).pos
    held = jnp.zeros((*below.shape[:3], tokens + 1), bool)
    held = jnp.put_along_axis(held, jnp.where(below < 0, tokens, below), True, axis=3, inplace=False)
    return live & ~jnp.take_along_axis(held, jnp.maximum(view.pos, 0), axis=3)


def judged_layers(gm: GroupMethod, view: View, length: Int[Array, "B"], attention: AttentionSpec) -> View:
    """Record this selection in the traces of the view of all layers."""
    if not any(isinstance(t, SelectionTrace) for t in gm.traces):
        return view
    assert gm.keep is not None
    n = gm.keep.budget.count(length)
    numbers = gm.number(jnp.arange(view.pos.shape[0], dtype=jnp.int32))

    def one(layer: Array, view: View) -> View:
        return judged(gm.traces, view, Observed({}, None, length, n, layer, attention))

    return over_layers(one, numbers, view)


def _decoded(segment: Segment, pools: tuple[Pages, ...]) -> View:
    if isinstance(segment, Slots):
        keys = segment.keys()
        return View(keys.k, keys.v, segment.pos, segment.bias, segment.traces)
    pool = pools[segment.pool]
    keys, traces = over_layers(lambda s: (gather_pages(s, pool), gather_traces(s, pool)), segment)
    return View(keys.k, keys.v, keys.pos, keys.bias, traces)


def score_slots(
    gm: GroupMethod,
    view: View,
    fresh: ComputedTokens,
    length: Int[Array, "B"],
    attention: AttentionSpec,
    weights: dict[str, Array] | None = None,
    met: AsMet | None = None,
) -> Float[Array, "Lg B K S"]:
    """Compute the keep's scores, +inf where a pattern protects and -inf where a slot is empty.

    Slots that several layers read get the sum of each reader's scores. weights: matrices of the group's
    layers [Lg, ...]. met: given if queries do not meet what is stored, as with latents (`Mixer.met`); a score
    that reads keys is then computed for every head expanded from a latent, and averaged over these heads.
    """
    assert gm.keep is not None and gm.keep.score is not None
    keep, score = gm.keep, gm.keep.score
    n = keep.budget.count(length)
    numbers = gm.number(jnp.arange(view.pos.shape[0], dtype=jnp.int32))

    weighs, met = score.weights, met if score.looks else None
    mine = weights if weighs or met is not None else None

    def one(layer: Array, view: View, observed: dict[str, Any], mine: Any) -> Float[Array, "B K S"]:
        known, matrices = observed | view.received, mine if weighs else None
        seen = Observed(
            known, None, length, n, layer, attention, weights=matrices, protect=keep.protect
        )  # fmt: skip
        if met is None:
            return ranked(keep, view, seen)
        heads = scored(score, _as_met(met, mine, view), seen).astype(jnp.float32)
        each = heads.reshape(*view.pos.shape[:2], -1, view.pos.shape[2])
        return ranked(keep, view, seen, _over_heads(each))

    each = [over_layers(one, numbers, view, seen, mine) for seen in (fresh.observed, *fresh.readers)]
    return reduce(jnp.add, each)


def _over_heads(scores: Float[Array, "B K R S"]) -> Float[Array, "B K S"]:
    """Compute the mean over R heads; slots infinite in some follow those that are in more, before others.

    A score of two stages gives infinity to what a head's first stage selects, which can be more slots than
    fit if heads select differently.
    """
    first, known = jnp.isposinf(scores), jnp.isfinite(scores)
    among = jnp.maximum((~first).sum(2), 1).astype(scores.dtype)
    mean = jnp.where(first, 0.0, scores).sum(2) / among
    high = scores.max((2, 3), initial=-jnp.inf, where=known)
    span = high - scores.min((2, 3), initial=jnp.inf, where=known)
    above = first.sum(2).astype(scores.dtype) * jnp.where(span > 0, 2 * span, 1.0)[..., None]
    return jnp.where(first.all(2), jnp.inf, mean + above)


def _as_met(met: AsMet, weights: dict[str, Array], view: View) -> View:
    """Expand a layer's slots as its queries meet them, with all heads that are expanded from a KV head."""
    k, v = met(weights, view.k, view.v, view.pos)
    each = k.shape[1] // view.pos.shape[1]
    pos, bias = (None if x is None else jnp.repeat(x, each, axis=1) for x in (view.pos, view.bias))
    assert pos is not None
    return View(k, v, pos, bias, {})


def preferences(
    gm: GroupMethod, view: View, fresh: ComputedTokens, length: Int[Array, "B"], attention: AttentionSpec
) -> Float[Array, "Lg B K"] | None:
    """Compute the layers' preferences by which the keep's allocation shares slots; None if scores suffice.

    Slots that several layers read get the sum of each reader's preference.
    """
    assert gm.keep is not None
    keep, allocate = gm.keep, gm.keep.allocate
    if not isinstance(allocate, Preferring):
        return None
    n = keep.budget.count(length)
    numbers = gm.number(jnp.arange(view.pos.shape[0], dtype=jnp.int32))

    def one(layer: Array, view: View, observed: dict[str, Any]) -> Float[Array, "B K"]:
        seen = Observed(observed | view.received, None, length, n, layer, attention)
        found = allocate.preference(view, seen).astype(jnp.float32)
        return shaped(allocate, "preferences", found, "[B, K]", view.pos.shape[:2])

    return reduce(jnp.add, [over_layers(one, numbers, view, s) for s in (fresh.observed, *fresh.readers)])


def merge_evicted(
    gm: GroupMethod,
    view: View,
    kept: Bool[Array, "Lg B K S"],
    fresh: ComputedTokens,
    length: Int[Array, "B"],
    attention: AttentionSpec,
    carried: dict[str, Any],
    params: dict[str, Any],
) -> tuple[View, dict[str, Any]]:
    """Merge every live slot of the view that is not kept into kept ones, by the keep's merge.

    carried: what rows carry for the merge [Lg, B, ...]; it is returned updated. params: the model's
    parameters, with fitted arrays.
    """
    assert gm.keep is not None
    keep, n = gm.keep, gm.keep.budget.count(length)
    numbers = gm.number(jnp.arange(view.pos.shape[0], dtype=jnp.int32))

    def one(layer: Array, view: View, kept: Array, observed: Any, carried: Any) -> Any:
        fitted = of_layer(params, layer)
        seen = Observed(observed | view.received, None, length, n, layer, attention, fitted=fitted)
        return folded(keep, view, kept, seen, carried)

    return over_layers(one, numbers, view, kept, fresh.observed, carried)


def reused(
    keeps: dict[int, Keep | None], scores: dict[int, Float[Array, "_ B K S"]]
) -> dict[int, Float[Array, "_ B K S"]]:
    """Compute the scores by which layers select: if a keep says so, several layers use their first one's."""
    out = dict(scores)
    alike = {i: (keep, scores[i].shape[1:]) for i, keep in keeps.items() if keep and keep.reuse > 1}
    for kind in dict.fromkeys(alike.values()):
        keep = kind[0]
        where = [(i, at) for i, other in alike.items() if other == kind for at in range(scores[i].shape[0])]
        source = {here: where[n // keep.reuse * keep.reuse] for n, here in enumerate(where)}
        for i in dict.fromkeys(i for i, _ in where):
            sources = [source[i, at] for at in range(scores[i].shape[0])]
            out[i] = jnp.stack([scores[j][at] for j, at in sources])
    return out


def choose(
    keeps: dict[int, Keep | None],
    scores: dict[int, Float[Array, "_ B K S"]],
    preferences: dict[int, Float[Array, "_ B K"] | None],
    length: Int[Array, "B"],
    groups: dict[int, Group],
) -> dict[int, Bool[Array, "_ B K S"]]:
    """Which slots stay, per group; budgets are allocated over all layers with the same keep and heads.

    groups: the groups' layers, which allocations see in their order.
    """
    chosen: dict[int, Array] = {}
    # Groups may have different numbers of empty slots, which do not matter here.
    alike = {i: (keep, scores[i].shape[1:3]) for i, keep in keeps.items()}
    for kind in dict.fromkeys(alike.values()):
        keep = kind[0]
        assert keep is not None
        where = [i for i, other in alike.items() if other == kind]
        most = max(scores[i].shape[3] for i in where)
        wide = [(0, 0)] * 3
        stacked = jnp.concatenate([
            jnp.pad(s, [*wide, (0, most - s.shape[3])], constant_values=-jnp.inf)
            for s in (scores[i] for i in where)
        ])  # fmt: skip
        mine = [groups[i] for i in where]
        more = [preferred for i in where if (preferred := preferences[i]) is not None]
        also = (in_layer_order(mine, jnp.concatenate(more)),) if more else ()
        counts = keep.allocate.counts(in_layer_order(mine, stacked), keep.budget.count(length), *also)
        shaped(keep.allocate, "counts", counts, "[L, B, K]", stacked.shape[:3])
        counts = in_group_order(mine, counts)
        at = 0
        for i in where:
            size = scores[i].shape[0]
            chosen[i] = top(scores[i], counts[at : at + size])
            at += size
    return chosen
