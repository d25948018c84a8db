"""Settling: `settle` scores, evicts and stores what a prompt computed; `prefill` also reads it, jitted."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.compress.below import Decoded, over_below, seeing
from kvjax.compress.capacity import longer, widened
from kvjax.compress.group import GroupMethod, strides_of
from kvjax.compress.layer_merge import PairLayer, merge_pair
from kvjax.compress.pages import build_group_pages
from kvjax.compress.segments import AT_ONCE, ChunkHint, build, extend, remember_in_pages, with_empty_tier
from kvjax.compress.select import (
    ComputedTokens,
    choose,
    in_first_tier,
    judged_layers,
    merge_evicted,
    preferences,
    union,
)
from kvjax.compress.summaries import summarised
from kvjax.grammar.calls import merges_unrotated
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import View, over_layers
from kvjax.grammar.read_kinds import Placing
from kvjax.models.attending import rotated
from kvjax.models.layers import Params
from kvjax.models.stacking import Group, groups_in, in_layer_order
from kvjax.models.transformer import IdsOrVectors
from kvjax.state.axes import pinned
from kvjax.state.cache import NOTHING, Cache, GroupState, Pages, Slots, State
from kvjax.state.codes import LEARNT, encode, with_arrays
from kvjax.steps.prefilling.narrowing import new_positions, stored_of, unnarrowed
from kvjax.steps.prefilling.observe import observe
from kvjax.steps.prefilling.probe import with_probe
from kvjax.steps.prefilling.read import PrefillOutputs, needs_of
from kvjax.steps.prefilling.restore_tokens import with_restored
from kvjax.steps.prefilling.scored import as_stored, group_scores
from kvjax.steps.shared.fitted_arrays import attach_arrays, groups_with_arrays, with_learnt
from kvjax.steps.shared.rotate import rotations_of, seen_by_words, unrotated_merges, with_starts
from kvjax.steps.shared.run import Run


def _no_slots(layers: int, rows: int) -> Slots:
    """Empty slots, for layers that read another layer's slots or have no context."""
    return Slots(jnp.zeros((layers, rows, 0, 0, 0)), None, jnp.zeros((layers, rows, 0, 0), jnp.int32))


def _state(gm: GroupMethod, new: dict[str, Array], more: int = 0) -> GroupState:
    """States as the method stores them: a codec encodes matrices, vectors are unencoded.

    more: the tokens that parts which grow must take in addition.
    """
    codec = gm.codecs[0]
    state = State({n: encode(x, codec if x.ndim >= 5 else None) for n, x in new.items()})
    return longer(gm, GroupState(state=state), more)


def _carried_by_merge(gm: GroupMethod, past: GroupState, view: View) -> dict[str, Any]:
    """Return what rows carry for the keep's merge, by its key [Lg, B, ...]."""
    assert gm.merge is not None
    name, layers = key_of(gm.merge), view.pos.shape[0]
    if name in past.rows:
        return {name: past.rows[name]}
    start = gm.merge.start(jax.tree.map(lambda x: x[0], view))
    return {name: jax.tree.map(lambda x: jnp.broadcast_to(x[None], (layers, *x.shape)), start)}


def settle(
    run: Run,
    params: Params,
    prompt: PrefillOutputs,
    cache: Cache | None,
    *,
    tokens: int,
    room: int,
    compress: bool,
    learn: bool = True,
) -> Cache:
    """Build the cache after a prefill: `settled` without its second result."""
    return settled(run, params, prompt, cache, tokens=tokens, room=room, compress=compress, learn=learn)[0]


def settled(
    run: Run,
    params: Params,
    prompt: PrefillOutputs,
    cache: Cache | None,
    *,
    tokens: int,
    room: int,
    compress: bool,
    ahead: ChunkHint = AT_ONCE,
    learn: bool = True,
) -> tuple[Cache, Bool[Array, "layers B"]]:
    """Build the cache after a prefill, and find the layers in which a live slot's score is NaN.

    tokens bounds how many tokens any row has seen (static). With compress=False, or if a group keeps
    everything, new tokens are added and nothing is evicted; windowed layers always keep their window. A row
    without new tokens, such as one that ended in an earlier chunk, is unchanged. ahead: what a chunk of a
    prompt must know of the others. learn: whether reads learn from the new tokens, which steps do not.
    """
    gms = groups_with_arrays(run.groups(params), params, cache)
    if any(gm.learns for gm in gms):
        gms = _with_learnt(gms, prompt)
    pos, length = prompt.positions
    if run.method.reread is not None and compress and cache is None:
        tokens = pos.shape[1]
    new = pos.shape[1]
    if prompt.narrowed is not None:
        new, tokens = stored_of(run, pos, prompt.narrowed, tokens)
    old_pools = () if cache is None else cache.pools
    pasts = (NOTHING,) * len(gms) if cache is None else attach_arrays(cache.groups, gms)
    acting = tuple(run.acts(gm, compress) for gm in gms)
    sizes = _Sizes(tokens, room, ahead)

    at_work = _begun(run, params, gms, prompt, pasts, old_pools, sizes, compress)
    groups, fresh, views, pools = at_work.groups, at_work.fresh, at_work.views, at_work.pools
    probe = None if run.method.keep is None or not compress else run.method.keep.probe
    if probe is not None and any(key_of(probe) not in f.observed for f in fresh.values()):
        fresh = with_probe(run, params, prompt, fresh, at_work.views, probe, pasts)
    shown = {i: view for i, view in at_work.shown.items() if acting[i]}
    scores = group_scores(run, params, gms, shown, fresh, length)
    after = length
    if compress and run.method.restore is not None:
        views, scores, after = with_restored(run, params, prompt, views, scores)
    kept = _selected(run, gms, shown, fresh, scores, length)
    idle = (pos < 0).all(-1)
    if cache is not None:
        before = {i: in_first_tier(gms[i], pasts[i], old_pools, views[i], tokens) for i in kept}
        kept = {i: jnp.where(idle[None, :, None, None], before[i], stay) for i, stay in kept.items()}
    views, carried = _merged_views(run, params, gms, views, kept, fresh, pasts, length)
    paged = [i for i in scores if gms[i].paged]
    if paged:
        each = [(gms[i], views[i], kept[i]) for i in paged]
        some, pools = build_group_pages(each, after, tokens, room, ahead.lists)
        groups |= dict(zip(paged, some, strict=True))
    groups |= _stored(gms, acting, at_work._replace(groups=groups, views=views), kept, carried, sizes, new)
    if learn:
        groups, pools = _summed_up(run, gms, groups, pasts, pools, idle, fresh, length)
    out = tuple(with_starts(groups[i], pasts[i]) if pasts[i].rows else groups[i] for i in range(len(gms)))
    new = Cache(with_arrays(out, ()), after, pools, strides=strides_of(gms))
    return pinned(new, run.on_mesh), _lost(params, scores, length)


def _with_learnt(gms: tuple[GroupMethod, ...], prompt: PrefillOutputs) -> tuple[GroupMethod, ...]:
    """Return the groups with what rows have learnt from this prompt for their codecs."""
    learnt = [f.rows if isinstance(f, ComputedTokens) else {} for f in prompt.fresh]
    return tuple(with_learnt(gm, rows) for gm, rows in zip(gms, learnt, strict=True))


def _merged_views(
    run: Run, params: Params, gms: tuple[GroupMethod, ...], views: dict[int, View],
    kept: dict[int, Bool[Array, "Lg B K S"]], fresh: dict[int, ComputedTokens], pasts: tuple[GroupState, ...],
    length: Int[Array, "B"],
) -> tuple[dict[int, View], dict[int, dict[str, Any]]]:  # fmt: skip
    """Merge evicted slots in every group whose keep merges at prompts; return what rows carry then, too."""
    views = dict(views)
    carried = {
        i: {} if gms[i].merge is None else _carried_by_merge(gms[i], pasts[i], view)
        for i, view in views.items()
    }
    for i, stay in kept.items():
        merge = gms[i].keep.merge  # type: ignore[union-attr]
        if merge is not None and merge.at_prompts:
            views[i], carried[i] = _merged(
                run, params, gms[i], views[i], stay, fresh[i], length, carried[i], pasts[i].rows
            )
    return views, carried


def _merged(
    run: Run,
    params: Params,
    gm: GroupMethod,
    view: View,
    stay: Bool[Array, "Lg B K S"],
    fresh: ComputedTokens,
    length: Int[Array, "B"],
    carried: dict[str, Any],
    rows: dict[str, Any],
) -> tuple[View, dict[str, Any]]:
    """Merge evicted slots of the view, as stored, into those that stay; return what rows carry then, too.

    rows: what the rows of the group's past carry.
    """
    spec, raw = run.attention_spec(gm.first), merges_unrotated(gm.keep)
    met = view if raw else seen_by_words(run, spec.rope, view, length, rows)
    new, carried = merge_evicted(gm, met, stay, fresh, length, spec, carried, params)

    def back(k: Array, met: View, stored: Array) -> Array:
        turns = rotations_of(run, length[:, None] - 1, [met.pos], rows=rows)[0].keys[0]
        return unrotated_merges(spec.rope, k, met, stored, turns, length)

    if run.unrotated and not raw:
        new = new._replace(k=over_layers(back, new.k, met, view.k))
    return new, carried


def _summed_up(
    run: Run, gms: tuple[GroupMethod, ...], groups: dict[int, GroupState], pasts: tuple[GroupState, ...],
    pools: tuple[Pages, ...], idle: Bool[Array, "B"], fresh: dict[int, ComputedTokens],
    length: Int[Array, "B"],
) -> tuple[dict[int, GroupState], tuple[Pages, ...]]:  # fmt: skip
    """Store what the reads of groups need beside slots."""
    groups = dict(groups)
    for i in fresh:
        if gms[i].read is None:
            continue
        asked = None if gms[i].asks is None else _asked(run, gms[i], fresh[i], length)
        groups[i], pools = summarised(gms[i], groups[i], pasts[i], pools, idle, asked)
    return groups, pools


def _asked(
    run: Run, gm: GroupMethod, fresh: ComputedTokens, length: Int[Array, "B"]
) -> tuple[Float[Array, "layers B N W H"], Int[Array, "layers B W"]]:
    """Return the newest queries, as a read that learns from them meets keys, and their positions."""
    assert gm.asks is not None
    q, at = fresh.observed[key_of(gm.asks)]
    if not isinstance(gm.read, Placing):
        return q, at
    rope, apart = run.attention_spec(gm.first).rope, gm.read.apart
    return over_layers(lambda q, at: rotated(rope, q, apart - at, length), q, at), at


class _Sizes(NamedTuple):
    """Static sizes of a cache: the most tokens a row has seen, free slots, and hints on later chunks."""

    tokens: int
    room: int
    ahead: ChunkHint


class _AtWork(NamedTuple):
    """The groups of layers while a prompt that was read is compressed and stored, one group after the other.

    groups: the finished ones. fresh: what every group with slots computed, as stored. views: the slots of the
    unfinished groups, as stored; shown: the same with keys as the method's words see them.
    """

    groups: dict[int, GroupState]
    fresh: dict[int, ComputedTokens]
    views: dict[int, View]
    shown: dict[int, View]
    pools: tuple[Pages, ...]


def _begun(
    run: Run,
    params: Params,
    gms: tuple[GroupMethod, ...],
    prompt: PrefillOutputs,
    pasts: tuple[GroupState, ...],
    old_pools: tuple[Pages, ...],
    sizes: _Sizes,
    compress: bool,
) -> _AtWork:
    """Finish groups that select nothing (states, merged layers, only growing ones); others form views."""
    pos, length = prompt.positions
    out, below = _AtWork({}, {}, {}, {}, old_pools), None
    for i, (gm, new) in enumerate(zip(gms, prompt.fresh, strict=True)):
        if not isinstance(new, ComputedTokens):
            size = groups_in(params)[i].size
            before = pasts[i] if pasts[i].parts else GroupState(tail=_no_slots(size, pos.shape[0]))
            ahead = sizes.ahead.slots[i] if sizes.ahead.slots else 0
            more = 0 if pasts[i].state is not None else sizes.room + ahead
            out.groups[i] = before if new is None else _state(gm, new, more)
            continue
        out.fresh[i] = fresh = as_stored(run, gm, new)
        here = pos if prompt.narrowed is None else new_positions(run, gm, pos, prompt.narrowed)
        if compress and gm.stack is not None:
            if gm.upper:
                lower, upper = (PairLayer(gms[j], pasts[j], out.fresh[j]) for j in (i - 1, i))
                pair = merge_pair(lower, upper, here, length, tokens=sizes.tokens, room=sizes.room)
                out.groups[i - 1], out.groups[i] = pair
            continue
        acting = run.acts(gm, compress)
        if pasts[i].parts and not acting and not gm.evicting:
            out.groups[i] = extend(seeing(gm, below), pasts[i], fresh, here)
            below = over_below(gm, out.groups[i], below)[1] if _seen(gms, i) else None
            out = out._replace(pools=remember_in_pages(gm, pasts[i], out.pools, fresh.masses))
            continue
        spec = run.attention_spec(gm.first)
        out.views[i] = union(gm, pasts[i], old_pools, fresh, here)
        out.shown[i] = out.views[i]
        if run.unrotated:
            out.shown[i] = seen_by_words(run, spec.rope, out.views[i], length, pasts[i].rows)
        if acting:
            out.shown[i] = judged_layers(gm, out.shown[i], length, spec)
            out.views[i] = out.views[i]._replace(traces=out.shown[i].traces)
    return out


def _stored(
    gms: tuple[GroupMethod, ...],
    acting: tuple[bool, ...],
    at_work: _AtWork,
    kept: dict[int, Bool[Array, "Lg B K S"]],
    carried: dict[int, dict[str, Any]],
    sizes: _Sizes,
    new: int,
) -> dict[int, GroupState]:
    """Build the groups that have views, with what their rows carry; those in no pages are encoded here."""
    out: dict[int, GroupState] = {}
    below: Decoded | None = None
    for i, view in at_work.views.items():
        group = at_work.groups.get(i)
        if group is None:
            gm = seeing(gms[i], below) if gms[i].sees_below else gms[i]
            group = _built(gm, acting[i], view, kept.get(i), sizes, i, new)
            below = over_below(gms[i], group, below)[1] if _seen(gms, i) else None
        rows = {key_of(o): at_work.fresh[i].rows[key_of(o)] for o in gms[i].carried}
        arrays = dict(gms[i].codec_arrays)
        rows |= {key_of(o): arrays[key_of(o)][LEARNT] for o in gms[i].learns if key_of(o) in arrays}
        out[i] = dataclasses.replace(group, rows=rows | carried[i])
    return out


def _seen(gms: tuple[GroupMethod, ...], i: int) -> bool:
    """Whether the codecs of the group above look at group `i`."""
    return i + 1 < len(gms) and gms[i + 1].sees_below


def _selected(
    run: Run, gms: tuple[GroupMethod, ...], shown: dict[int, View], fresh: dict[int, ComputedTokens],
    scores: dict[int, Float[Array, "Lg B K S"]], length: Int[Array, "B"],
) -> dict[int, Bool[Array, "Lg B K S"]]:  # fmt: skip
    """Choose the slots that stay by their scores and by what allocations prefer, per group."""
    specs = {i: run.attention_spec(gms[i].first) for i in scores}
    preferred = {i: preferences(gms[i], shown[i], fresh[i], length, specs[i]) for i in scores}
    groups = {i: Group(gms[i].first, x.shape[0], gms[i].stride) for i, x in scores.items()}
    return choose({i: gms[i].keep for i in scores}, scores, preferred, length, groups)


def _built(
    gm: GroupMethod,
    acting: bool,
    view: View,
    kept: Bool[Array, "Lg B K S"] | None,
    sizes: _Sizes,
    index: int,
    new: int,
) -> GroupState:
    """Build a group's dense segments; a keep that does not act yet keeps all, and free slots follow."""
    plain = gm if acting else gm.replaced(keep=None, stack=None)
    if sizes.ahead.slots and not (acting or gm.evicting):
        return widened(plain, build(plain, view, None, new, sizes.room), sizes.ahead.slots[index])
    built = build(plain, view, kept, sizes.tokens, sizes.room)
    if gm.evicting and gm.split and not acting:
        # Steps need a spare granule: places of evicted slots are free only once granules are compacted.
        return widened(gm, built, gm.granule)
    return built if acting else with_empty_tier(gm, built, view, sizes.tokens, sizes.room)


def _lost(
    params: Params, scores: dict[int, Float[Array, "Lg B K S"]], length: Int[Array, "B"]
) -> Bool[Array, "layers B"]:
    """Find the layers in which a live slot's score is NaN."""
    groups = groups_in(params)
    each = [
        jnp.isnan(scores[i]).any((2, 3)) if i in scores else jnp.zeros((group.size, *length.shape), bool)
        for i, group in enumerate(groups)
    ]
    return in_layer_order(groups, jnp.concatenate(each))


@partial(jax.jit, static_argnames=("run", "tokens_bound", "room", "compress", "ahead", "watched"))
def prefill(
    run: Run,
    params: Params,
    tokens: IdsOrVectors,
    lengths: Int[Array, "B"],
    cache: Cache | None,
    *,
    tokens_bound: int,
    room: int,
    compress: bool,
    ahead: ChunkHint = AT_ONCE,
    watched: bool = False,
) -> tuple[Float[Array, "B V"], Cache] | tuple[Float[Array, "B V"], Cache, Bool[Array, "layers B"]]:
    """Logits at each row's last new token, and the cache after storing (and compressing) the new tokens.

    watched: also returns the layers in which a score is NaN, in rows whose logits are finite numbers.
    """
    needs = needs_of(run, params, compress)
    prompt = observe(run if compress else unnarrowed(run), params, tokens, lengths, cache, needs)
    sizes: dict[str, Any] = dict(tokens=tokens_bound, room=room, ahead=ahead)
    new, lost = settled(run, params, prompt, cache, compress=compress, **sizes)
    if not watched:
        return prompt.logits, new
    return prompt.logits, new, lost & ~jnp.isnan(prompt.logits).any(-1)[None]
