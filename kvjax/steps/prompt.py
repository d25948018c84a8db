"""Many new tokens: `observe` reads them, `settle` scores, evicts and stores; `prefill` is both, jitted."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import (
    NOTHING,
    Cache,
    GroupState,
    Slots,
    State,
    encode,
)
from kvjax.choose import Fresh, choose, judged_layers, merge_evicted, preferences, score_slots, union
from kvjax.fitted import of_layer
from kvjax.grammar import Method
from kvjax.group import GroupMethod
from kvjax.keep.observe import Mass, RawKeys
from kvjax.models.attending import attend_new, new_keys, published_by, rotary
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer, Memory, Projected, Step
from kvjax.models.transformer import IdsOrVectors, Positions, decode_layers, positions, unembed
from kvjax.pairs import Half, merge_pair
from kvjax.protocols import Carried, Inputs, Meeting, Trace, View
from kvjax.room import widened
from kvjax.segments import AT_ONCE, Ahead, build, build_group_pages, extend, remember_in_pages, whole_slots
from kvjax.steps.lending import lend, returned, taught_groups
from kvjax.steps.narrowing import by_token, chosen, narrow_of, narrowing, new_positions, unnarrowed
from kvjax.steps.observed import by_owner, carried_behind, decoded, past_sets
from kvjax.steps.run import Run, answered, held, repeated, seen_by_words, turn_keys
from kvjax.stored import completed
from kvjax.summaries import learnt
from kvjax.words import observations


class Prompt(NamedTuple):
    """Everything a prefill computed, before anything was compressed.

    fresh: per group a Fresh, the new states, or None where the layers add nothing. narrowed: the positions of
    the tokens that the upper layers saw, where the method has a `Narrow`. source: which of the given tokens
    these are (-1 on padding), where it has a `Reread`. logits: of each row's last token, or of every token.
    """

    fresh: tuple[Fresh | dict[str, Array] | None, ...]
    positions: Positions
    tokens: IdsOrVectors
    logits: Float[Array, "B *_ V"]
    narrowed: Int[Array, "B M"] | None = None
    source: Int[Array, "B M"] | None = None


def observe(
    run: Run,
    params: Params,
    tokens: IdsOrVectors,
    lengths: Int[Array, "B"],
    cache: Cache | None,
    needs: frozenset,
    as_steps: bool = False,
) -> Prompt:
    """New tokens through the model, over what the cache holds; nothing is stored yet.

    as_steps: as single steps compute it: tokens meet each other as they will be stored, in a method's codes,
    and the logits are those of all of them.
    """
    config, source = run.config, None
    if run.method.reread is not None:
        tokens, lengths, source = _reread(run, params, tokens, lengths, cache)
    start = jnp.zeros_like(lengths) if cache is None else cache.next
    at = positions(tokens, lengths, start)
    states = (NOTHING,) * len(params["layers"]) if cache is None else cache.groups
    pools = () if cache is None else cache.pools
    masses = tuple(sorted((o for o in needs if isinstance(o, Mass)), key=repr))
    meetings = sorted((o for o in needs if isinstance(o, Meeting)), key=repr)
    others = [o for o in needs if not isinstance(o, Mass | Trace | Meeting)]
    remembered = [t for t in needs if isinstance(t, Trace)]
    narrow, gms = narrowing(run, at), taught_groups(run.groups(params), params)
    states = lend(states, gms)

    def attend(layer: Layer, x: Projected, state: GroupState):
        past = past_sets(layer, completed(states, layer.group, state), pools)
        phase = layer.pos
        # A prefill that ends early has the queries of the last tokens alone, over the keys of all.
        pos = at.pos if narrow is None else layer.pos
        if run.rank_phase and past:
            held = past[-1].pos
            assert held is not None
            live = (held >= 0).sum(-1, dtype=jnp.int32)
            phase = live[..., None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, None]
        group = x.q.shape[1] // phase.shape[1] if phase.ndim == 3 else 1
        q = rotary(layer, x.q, jnp.repeat(phase, group, axis=1) if phase.ndim == 3 else phase, at.length)
        phase = pos if phase is layer.pos else phase
        turn = partial(rotary, layer, pos=phase, length=at.length)
        mine = None if x.k is None else turn(x.k)
        k, v = mine, x.v
        if as_steps and x.k is not None and k is not None:
            k, v = decoded(run, gms[layer.group], layer, pos, turn, x.k, (k, v))
        past = [turn_keys(run, layer.rope, keys, at.length) for keys in past]
        new = new_keys(layer, k, v, pos)
        gone = answered(gms[layer.group], layer, state, q, params)
        out, found, scores = attend_new(
            layer, x, q, new, past, layer.pos, gone, mass=tuple(o.reduction for o in masses),
            implementation=run.without_gpu,
        )  # fmt: skip
        taught = of_layer(params, layer.number)
        inputs = Inputs(q, x.q, new.k if x.k is None else x.k, x.hidden, pos, at.length, taught)
        received = tuple({repr(o): m for o, m in zip(masses, of_set, strict=True)} for of_set in found)
        if meetings:
            sets = [*past, new]
            received = received or ({},) * len(sets)
            met = [{repr(o): o.of(q, pos, s.k, s.pos) for o in meetings if s.pos is not None} for s in sets]
            received = tuple(a | b for a, b in zip(received, met, strict=True))
        rows = {repr(o): carried_behind(o, inputs, layer, state) for o in others if isinstance(o, Carried)}
        observed = {repr(o): o.read(rows[repr(o)]) if isinstance(o, Carried) else o(inputs) for o in others}
        traces = {repr(t): t.start(inputs, new.k.shape[1]) for t in remembered}
        fresh = Fresh(mine, x.v, observed, received, traces, rows=rows)
        return out, state, published_by(layer, state, k, v, scores) | {"collected": fresh}

    def recur(layer: Layer, step: Step, state: GroupState):
        past = state.state
        out, new = step(None if past is None else past.layer(layer.index), at.pos >= 0)
        return out, state, {"collected": new}

    last = jnp.maximum(lengths - 1, 0)
    early = None if needs or as_steps or narrow is not None else last
    memory = Memory(at.pos, attend, recur, held, early, run.without_gpu, narrow)
    ran = decode_layers(params, tokens, config, memory, states)
    x, narrowed = ran.x, None if narrow is None else ran.pos
    if narrowed is not None:
        last = jnp.maximum((narrowed >= 0).sum(-1, dtype=jnp.int32) - 1, 0)
    if not as_steps:
        x = x[:, 0] if x.shape[1] == 1 else jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
    logits = unembed(params, x, config)
    fresh = by_owner(gms, config, ran.collected, masses)
    return Prompt(fresh, at, tokens, logits, narrowed, source)


def _reread(
    run: Run, params: Params, tokens: IdsOrVectors, lengths: Int[Array, "B"], cache: Cache | None
) -> tuple[Int[Array, "B M"], Int[Array, "B"], Int[Array, "B M"]]:
    """The tokens that are read, their number per row, and which of the given ones they are (-1: none)."""
    first, count, last = 0, 0, run.method.reread.after(run.config.layers)
    while first <= last:
        first, count = first + next(iter(params["layers"][count].values())).shape[0], count + 1
    if first != last + 1:
        raise ValueError(
            f"the tokens to read are chosen at layer {last}, inside stacked layers that end at {first - 1}: "
            f"choose at layer {first - 1}, or give layers that are not stacked"
        )
    below = params | {"layers": params["layers"][:count]}
    past = None if cache is None else dataclasses.replace(cache, groups=cache.groups[:count])
    # Something is observed, so that no layer runs for the last tokens alone.
    needs = run.method.reread.needs | {RawKeys()}
    found = observe(unnarrowed(run), below, tokens, lengths, past, needs)
    index, used = chosen(run, found.positions, found.fresh[-1])
    again = jnp.where(used, jnp.take_along_axis(tokens, index, axis=1), 0)
    return again, used.sum(-1, dtype=jnp.int32), jnp.where(used, index, -1)


def needs_of(run: Run, params: Params, compress: bool = True) -> frozenset:
    """What settling a prompt needs: the keeps' observations and traces, and unrotated keys to store.

    Traces grow whether slots leave now or not.
    """
    out = frozenset({RawKeys()}) if run.unrotated else frozenset()
    narrow = narrow_of(run)
    out |= narrow.needs if narrow is not None and compress else frozenset()
    for gm in run.groups(params):
        out |= {*gm.traces, *(o for trace in gm.traces for o in trace.needs)}
        if gm.keep is not None and gm.keep.score is not None and (compress or gm.evicting):
            out |= {*observations(gm.keep)}
    return out


def _as_stored(run: Run, gm: GroupMethod, fresh: Fresh) -> Fresh:
    """Keys and values as the method stores them: perhaps unrotated, repeated for per-query-head lists."""
    assert fresh.k is not None
    k = fresh.observed[repr(RawKeys())] if run.unrotated else fresh.k
    v = None if fresh.v is None else repeated(run, gm.first, fresh.v, 2)
    return fresh._replace(k=repeated(run, gm.first, k, 2), v=v)


def _no_slots(layers: int, rows: int) -> Slots:
    """What layers hold that read another one's slots, or no context: nothing, in the shape of slots."""
    empty = jnp.zeros((layers, rows, 0, 0, 0))
    return Slots(empty, None, jnp.zeros((layers, rows, 0, 0), jnp.int32))


def _state(gm: GroupMethod, new: dict[str, Array]) -> State:
    """States as the method stores them: a codec encodes matrices, vectors stay as they are."""
    codec = gm.codecs[0]
    return State({n: encode(x, codec if x.ndim >= 5 else None) for n, x in new.items()})


def _carried_by_merge(gm: GroupMethod, past: GroupState, view: View) -> dict[str, Any]:
    """What rows carry of the keep's merge, by its repr [Lg, B, ...]; nothing where it carries nothing."""
    if gm.merge is None:
        return {}
    name, layers = repr(gm.merge), view.pos.shape[0]
    if name in past.rows:
        return {name: past.rows[name]}
    start = gm.merge.start(jax.tree.map(lambda x: x[0], view))
    return {name: jax.tree.map(lambda x: jnp.broadcast_to(x[None], (layers, *x.shape)), start)}


def settle(
    run: Run, params: Params, prompt: Prompt, cache: Cache | None, *, tokens: int, room: int, compress: bool
) -> Cache:
    """From what a prefill computed to the cache it leaves, as `settled` without its second result."""
    return settled(run, params, prompt, cache, tokens=tokens, room=room, compress=compress)[0]


def settled(
    run: Run,
    params: Params,
    prompt: Prompt,
    cache: Cache | None,
    *,
    tokens: int,
    room: int,
    compress: bool,
    ahead: Ahead = AT_ONCE,
) -> tuple[Cache, Bool[Array, "layers B"]]:
    """The cache that a prefill leaves, and the layers in which a live slot's score is not a number (NaN).

    tokens bounds how many tokens any row has seen (static). With compress=False, or where a group keeps
    everything, new tokens are added and nothing is evicted; windowed layers always keep their window. ahead:
    what a chunk of a prompt is told of the others.
    """
    gms = taught_groups(run.groups(params), params)
    pos, length = prompt.positions
    if prompt.source is not None and cache is None:
        tokens = min(tokens, run.method.reread.most(tokens))
    old_pools = () if cache is None else cache.pools
    pasts = (NOTHING,) * len(gms) if cache is None else lend(cache.groups, gms)
    acting = [run.acts(gm, compress) for gm in gms]

    pools = old_pools
    fresh: dict[int, Fresh] = {}
    groups: dict[int, GroupState] = {}
    # The slots of every group as they are stored, and with the keys that its words look at.
    views: dict[int, View] = {}
    shown: dict[int, View] = {}
    for i, (gm, new) in enumerate(zip(gms, prompt.fresh, strict=True)):
        if not isinstance(new, Fresh):
            size = next(iter(params["layers"][i].values())).shape[0]
            before = pasts[i] if pasts[i].parts else GroupState(tail=_no_slots(size, pos.shape[0]))
            groups[i] = before if new is None else GroupState(state=_state(gm, new))
            continue
        fresh[i] = _as_stored(run, gm, new)
        here = new_positions(run, gm, prompt.positions, prompt.narrowed)
        if run.merges(gm, compress):
            if gm.upper:
                lower, upper = (Half(gms[j], pasts[j], fresh[j]) for j in (i - 1, i))
                groups[i - 1], groups[i] = merge_pair(lower, upper, here, length, tokens=tokens, room=room)
            continue
        if pasts[i].parts and not acting[i] and not gm.evicting:
            groups[i] = extend(gm, pasts[i], fresh[i], here)
            pools = remember_in_pages(gm, pasts[i], pools, fresh[i].masses)
            continue
        views[i] = union(gm, pasts[i], old_pools, fresh[i], here)
        shown[i] = seen_by_words(run, run.attention_spec(gm.first).rope, views[i], length)
        if acting[i]:
            shown[i] = judged_layers(gm, shown[i], length, run.attention_spec(gm.first))
            views[i] = views[i]._replace(traces=shown[i].traces)
    probe = None if run.method.keep is None or not compress else run.method.keep.probe
    if probe is not None and any(repr(probe) not in f.observed for f in fresh.values()):
        fresh = _with_probe(run, params, prompt, fresh, shown, probe, pasts)
    scores = {
        i: score_slots(
            gms[i],
            view,
            fresh[i],
            length,
            run.attention_spec(gms[i].first),
            params["layers"][i],
            run.met(gms[i].first),
        )  # fmt: skip
        for i, view in shown.items()
        if acting[i]
    }
    preferred = {
        i: preferences(gms[i], shown[i], fresh[i], length, run.attention_spec(gms[i].first)) for i in scores
    }
    kept = choose({i: gms[i].keep for i in scores}, scores, preferred, length)
    if cache is not None:
        # A row without new tokens, such as one that ended in an earlier chunk, stays as it is.
        idle = (pos < 0).all(-1)[None, :, None, None]
        kept = {i: stay | (idle & (views[i].pos >= 0)) for i, stay in kept.items()}
    carried = {i: _carried_by_merge(gms[i], pasts[i], view) for i, view in views.items()}
    for i, stay in kept.items():
        if gms[i].keep.merge is not None:  # type: ignore[union-attr]
            views[i], carried[i] = merge_evicted(
                gms[i], views[i], stay, fresh[i], length, run.attention_spec(gms[i].first), carried[i], params
            )

    paged = [i for i in scores if gms[i].paged]
    if paged:
        each = [(gms[i], views[i], kept[i]) for i in paged]
        some, pools = build_group_pages(each, length, tokens, room, ahead.lists)
        groups |= dict(zip(paged, some, strict=True))
    for i in views:
        if i not in groups:
            # A keep that was not asked to act yet leaves everything, with the room behind it.
            gm = gms[i] if acting[i] else gms[i]._replace(keep=None, stack=None)
            if ahead.slots and not (acting[i] or gms[i].evicting):
                groups[i] = widened(gm, build(gm, views[i], None, pos.shape[1], room), ahead.slots[i])
            else:
                groups[i] = build(gm, views[i], kept.get(i), tokens, room)
        rows = {repr(o): fresh[i].rows[repr(o)] for o in gms[i].carried}
        groups[i] = dataclasses.replace(groups[i], rows=rows | carried[i])
    groups |= {i: learnt(gms[i], groups[i], pasts[i], (pos < 0).all(-1)) for i in fresh}
    sizes = [jax.tree.leaves(p)[0].shape[0] for p in params["layers"]]
    lost = [
        jnp.isnan(scores[i]).any((2, 3)) if i in scores else jnp.zeros((size, *length.shape), bool)
        for i, size in enumerate(sizes)
    ]
    new = Cache(tuple(groups[i] for i in range(len(gms))), length, pools)
    return returned(new), jnp.concatenate(lost)


def scored(run: Run, params: Params, prompt: Prompt) -> dict[int, Float[Array, "_ B _ T"]]:
    """By group, the scores of a first prompt's tokens, as `settle` chooses by; only groups that have any.

    Tokens that a group's layers did not see score -inf.
    """
    gms = run.groups(params)
    fresh = {i: _as_stored(run, gms[i], f) for i, f in enumerate(prompt.fresh) if isinstance(f, Fresh)}
    at = {i: new_positions(run, gms[i], prompt.positions, prompt.narrowed) for i in fresh}
    views = {i: union(gms[i], NOTHING, (), f, at[i]) for i, f in fresh.items()}
    length, specs = prompt.positions.length, {i: run.attention_spec(gms[i].first) for i in fresh}
    views = {i: seen_by_words(run, specs[i].rope, view, length) for i, view in views.items()}
    views = {i: judged_layers(gms[i], view, length, specs[i]) for i, view in views.items()}
    probe = None if run.method.keep is None else run.method.keep.probe
    if probe is not None:
        fresh = _with_probe(run, params, prompt, fresh, views, probe, (NOTHING,) * len(gms))
    found = {
        i: score_slots(
            gms[i],
            view,
            fresh[i],
            length,
            specs[i],
            params["layers"][i],
            run.met(gms[i].first),
        )
        for i, view in views.items()
        if gms[i].keep is not None
    }
    tokens = prompt.positions.pos.shape[1]
    return {i: by_token(x, at[i], tokens) if x.shape[3] < tokens else x for i, x in found.items()}


def _with_probe(
    run: Run,
    params: Params,
    prompt: Prompt,
    fresh: dict[int, Fresh],
    views: dict[int, View],
    probe: Any,
    pasts: tuple[GroupState, ...],
) -> dict[int, Fresh]:
    """`fresh` with the largest attention that every uncompressed slot receives from a probe's queries."""
    pos, length = prompt.positions
    tokens, lengths = probe.tokens(prompt.tokens, (pos >= 0).sum(-1, dtype=jnp.int32))
    gms = run.groups(params)
    whole = {i: GroupState(tail=whole_slots(gms[i], view)) for i, view in views.items()}
    states = {
        i: GroupState(state=State(dict(new))) for i, new in enumerate(prompt.fresh) if isinstance(new, dict)
    }
    fixed = {i: pasts[i] for i, new in enumerate(prompt.fresh) if new is None}
    groups = tuple((whole | states | fixed).get(i, NOTHING) for i in range(len(gms)))
    reading = observe(
        Run(run.config, Method()), params, tokens, lengths, Cache(groups, length), frozenset({Mass("max")})
    )
    out = {}
    for i, f in fresh.items():
        seen = {repr(probe): reading.fresh[i].masses[0][repr(Mass("max"))]}  # type: ignore[union-attr]
        out[i] = f._replace(observed=f.observed | seen, readers=tuple(r | seen for r in f.readers))
    return out


def probed(run: Run, params: Params, prompt: Prompt, probe: Any) -> Prompt:
    """A prompt read for the first time together with a probe's scores, so that many budgets share them."""
    gms = run.groups(params)
    fresh = {i: f for i, f in enumerate(prompt.fresh) if isinstance(f, Fresh)}
    views = {i: union(gms[i], NOTHING, (), f, prompt.positions.pos) for i, f in fresh.items()}
    fresh = _with_probe(run, params, prompt, fresh, views, probe, (NOTHING,) * len(gms))
    return prompt._replace(fresh=tuple(fresh.get(i, f) for i, f in enumerate(prompt.fresh)))


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
    ahead: Ahead = AT_ONCE,
    watched: bool = False,
) -> tuple[Float[Array, "B V"], Cache] | tuple[Float[Array, "B V"], Cache, Bool[Array, "layers B"]]:
    """Logits at each row's last new token, and the cache after storing (and compressing) them.

    watched: also the layers in which a score is not a number, in the rows whose logits are numbers.
    """
    needs = needs_of(run, params, compress)
    prompt = observe(run if compress else unnarrowed(run), params, tokens, lengths, cache, needs)
    sizes: dict[str, Any] = dict(tokens=tokens_bound, room=room, ahead=ahead)
    new, lost = settled(run, params, prompt, cache, compress=compress, **sizes)
    if not watched:
        return prompt.logits, new
    return prompt.logits, new, lost & ~jnp.isnan(prompt.logits).any(-1)[None]
