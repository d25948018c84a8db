"""The two pure functions every run is made of: `prefill` (many new tokens) and `step` (one).

Both are jitted with static (config, method) and take parameters and cache as plain pytrees. They know
segments, allocations and evictions, but no method by name.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import (
    Cache,
    Codes,
    Paged,
    Pages,
    Segment,
    Slots,
    encode,
    first_empty,
    gather_pages,
    write_slots,
)
from kvjax.choose import Fresh, choose, merge_evicted, score_slots, union
from kvjax.grammar import AttentionSpec, Inputs, Method, Seen, View
from kvjax.group import GroupMethod, group_method
from kvjax.keep.observe import Mass, Queries, RawKeys
from kvjax.models.transformer import (
    Config,
    Context,
    Layer,
    Params,
    Projected,
    positions,
    rotary,
    stack,
    unembed,
)
from kvjax.ops.attention import Keys, attend, causal_attention, merge
from kvjax.place.paged import attend_pages
from kvjax.segments import build, build_group_pages, extend, flush


class Run(NamedTuple):
    """What is static in a run: equal values share compiled programs."""

    config: Config
    method: Method

    def groups(self, params: Params) -> tuple[GroupMethod, ...]:
        out, first = [], 0
        for p in params["layers"]:
            size = next(iter(p.values())).shape[0]
            out.append(group_method(self.method, first, size, self.config.window(first)))
            first += size
        return tuple(out)

    @property
    def rank_phase(self) -> bool:
        return self.method.keep is not None and self.method.keep.rank_phase

    @property
    def per_query_head(self) -> bool:
        return self.method.keep is not None and self.method.keep.per_query_head

    def attention_spec(self, layer: int) -> AttentionSpec:
        c = self.config
        return AttentionSpec(c.scale, c.attention_softcap, c.layer_rope(layer))


# --- phases ------------------------------------------------------------------------------------------


def _ranks_by_position(pos: Int[Array, "B K S"]) -> Int[Array, "B K S"]:
    """How many live slots hold an older token: the phase of StreamingLLM's cache-relative rotation."""
    order = jnp.argsort(jnp.where(pos < 0, jnp.iinfo(jnp.int32).max, pos), axis=-1)
    return jnp.argsort(order, axis=-1).astype(jnp.int32)


def _turn_keys(run: Run, layer: Layer, keys: Keys, length: Array) -> Keys:
    if not run.rank_phase:
        return keys
    return keys._replace(k=rotary(layer, keys.k, _ranks_by_position(keys.pos), length))


def _per_head(run: Run, window: int | None, x: Array, axis: int = 1) -> Array:
    """Keys or values repeated for every query head where the method selects per query head."""
    if not run.per_query_head or window is not None:
        return x
    return jnp.repeat(x, run.config.heads // x.shape[axis], axis=axis)


# --- prefill -----------------------------------------------------------------------------------------


class Prompt(NamedTuple):
    """Everything a prefill computed, before anything was compressed: one Fresh per group."""

    fresh: tuple[Fresh, ...]
    context: Context
    tokens: Int[Array, "B T"]
    logits: Float[Array, "B V"]


def observe(
    run: Run,
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    cache: Cache | None,
    needs: frozenset,
) -> Prompt:
    """New tokens through the model, over what the cache holds; nothing is stored yet."""
    config = run.config
    start = jnp.zeros_like(lengths) if cache is None else cache.next
    context = positions(tokens, lengths, start)
    states = ((),) * len(params["layers"]) if cache is None else cache.groups
    pools = () if cache is None else cache.pools
    reduce = next((o.reduce for o in needs if isinstance(o, Mass)), None)

    def attention(layer: Layer, x: Projected, state: tuple[Segment, ...]):
        past = [_keys(s, layer.index, pools) for s in state]
        phase = context.pos
        if run.rank_phase and past:
            live = (past[-1].pos >= 0).sum(-1, dtype=jnp.int32)
            phase = live[..., None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, None]
        group = config.heads // config.kv_heads
        q = rotary(layer, x.q, jnp.repeat(phase, group, axis=1) if phase.ndim == 3 else phase, context.length)
        k = rotary(layer, x.k, phase, context.length)
        new = Keys(k, x.v, context.pos[:, None])
        past = [_turn_keys(run, layer, keys, context.length) for keys in past]
        out, masses = causal_attention(
            q, new, past, context.pos,
            scale=config.scale, window=layer.window, softcap=config.attention_softcap, mass=reduce,
        )  # fmt: skip
        inputs = Inputs(q, x.q, x.k, x.hidden, context.pos, context.length)
        observed = {repr(o): o(inputs) for o in needs if not isinstance(o, Mass)}
        return out, state, Fresh(k, x.v, observed, masses)

    x, _, fresh = stack(params, tokens, config, attention, states)
    last = jnp.maximum(lengths - 1, 0)
    logits = unembed(params, jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0], config)
    return Prompt(fresh, context, tokens, logits)


def _keys(segment: Segment, index: int | Array, pools: tuple[Pages, ...]) -> Keys:
    one = segment.layer(index)
    return gather_pages(one, pools[one.pool]) if isinstance(one, Paged) else one.keys()


def needs_of(run: Run, params: Params, compress: bool = True) -> frozenset:
    """All observations that settling a prompt needs: what the keeps ask for, and unrotated keys for ranks."""
    out = frozenset({RawKeys()}) if run.rank_phase else frozenset()
    for gm in run.groups(params):
        if gm.keep is not None and gm.keep.score is not None and (compress or gm.evicting):
            out |= gm.keep.score.needs
            out |= gm.keep.merge.needs if gm.keep.merge is not None else frozenset()
    return out


def _as_stored(run: Run, gm: GroupMethod, fresh: Fresh) -> Fresh:
    """Keys and values as the method stores them: unrotated for ranks, repeated for per-query-head lists."""
    k = fresh.observed[repr(RawKeys())] if run.rank_phase else fresh.k
    window = run.config.window(gm.first)
    return fresh._replace(k=_per_head(run, window, k, 2), v=_per_head(run, window, fresh.v, 2))


def settle(
    run: Run, params: Params, prompt: Prompt, cache: Cache | None, *, tokens: int, room: int, compress: bool
) -> Cache:
    """From what a prefill computed to the cache it leaves.

    tokens bounds how many tokens any row has seen (static). With compress=False, or where a group keeps
    everything, new tokens are added and nothing is evicted; windowed layers always keep their window.
    """
    gms = run.groups(params)
    pos, length = prompt.context
    old_pools = () if cache is None else cache.pools
    pasts = ((),) * len(gms) if cache is None else cache.groups
    acting = [gm.keep is not None and (compress or run.config.window(gm.first) is not None) for gm in gms]
    fresh = [_as_stored(run, gm, f) for gm, f in zip(gms, prompt.fresh, strict=True)]

    groups: dict[int, tuple[Segment, ...]] = {}
    views: dict[int, View] = {}
    for i, gm in enumerate(gms):
        if pasts[i] and not acting[i] and not gm.evicting:
            groups[i] = extend(gm, pasts[i], fresh[i], pos)
            continue
        views[i] = union(gm, pasts[i], old_pools, fresh[i], pos)
    probe = None if run.method.keep is None or not compress else run.method.keep.probe
    if probe is not None and repr(probe) not in fresh[0].observed:
        seen = _probe_mass(run, params, prompt, [views[i] for i in range(len(gms))], probe)
        fresh = [
            f._replace(observed={**f.observed, repr(probe): m}) for f, m in zip(fresh, seen, strict=True)
        ]
    scores = {
        i: score_slots(gms[i], view, fresh[i], length, run.attention_spec(gms[i].first))
        for i, view in views.items()
        if acting[i]
    }
    kept = choose({i: gms[i].keep for i in scores}, scores, length)
    if cache is not None:
        # A row without new tokens, such as one that ended in an earlier chunk, stays as it is.
        idle = (pos < 0).all(-1)[None, :, None, None]
        kept = {i: stay | (idle & (views[i].pos >= 0)) for i, stay in kept.items()}
    for i, stay in kept.items():
        if gms[i].keep.merge is not None:  # type: ignore[union-attr]
            views[i] = merge_evicted(
                gms[i], views[i], stay, fresh[i], length, run.attention_spec(gms[i].first)
            )

    pools = old_pools
    paged = [i for i in scores if gms[i].paged]
    if paged:
        some, pools = build_group_pages([(gms[i], views[i], kept[i]) for i in paged], tokens, room)
        groups |= dict(zip(paged, some, strict=True))
    for i in views:
        if i not in groups:
            # A keep that was not asked to act yet leaves everything, with the room behind it.
            gm = gms[i] if acting[i] else gms[i]._replace(keep=None)
            groups[i] = build(gm, views[i], kept.get(i), tokens, room)
    return Cache(tuple(groups[i] for i in range(len(gms))), length, pools)


def _probe_mass(
    run: Run, params: Params, prompt: Prompt, views: list[View], probe: Any
) -> list[Float[Array, "Lg B K S"]]:
    """The largest attention that every uncompressed slot receives from a probe's queries, per group."""
    pos, length = prompt.context
    tokens, lengths = probe.tokens(prompt.tokens, (pos >= 0).sum(-1, dtype=jnp.int32))
    whole = Cache(tuple((Slots(*view[:4]),) for view in views), length)
    plain = Run(run.config, Method())
    reading = observe(plain, params, tokens, lengths, whole, frozenset({Mass("max")}))
    return [fresh.masses[0] for fresh in reading.fresh]


def probed(run: Run, params: Params, prompt: Prompt, probe: Any) -> Prompt:
    """A prompt read for the first time together with a probe's scores, so that many budgets share them."""
    gms = run.groups(params)
    views = [union(gm, (), (), f, prompt.context.pos) for gm, f in zip(gms, prompt.fresh, strict=True)]
    seen = _probe_mass(run, params, prompt, views, probe)
    fresh = (
        f._replace(observed={**f.observed, repr(probe): m}) for f, m in zip(prompt.fresh, seen, strict=True)
    )
    return prompt._replace(fresh=tuple(fresh))


@partial(jax.jit, static_argnames=("run", "tokens_bound", "room", "compress"))
def prefill(
    run: Run,
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    cache: Cache | None,
    *,
    tokens_bound: int,
    room: int,
    compress: bool,
) -> tuple[Float[Array, "B V"], Cache]:
    """Logits at each row's last new token, and the cache after storing (and compressing) them."""
    needs = needs_of(run, params, compress)
    prompt = observe(run, params, tokens, lengths, cache, needs)
    new = settle(run, params, prompt, cache, tokens=tokens_bound, room=room, compress=compress)
    return prompt.logits, new


# --- one token ---------------------------------------------------------------------------------------


def step_fn(
    run: Run, params: Params, cache: Cache, token: Int[Array, "B"], append: Bool[Array, "B"]
) -> tuple[Float[Array, "B V"], Cache]:
    """One token per row: append it, attend, evict.

    Rows with append=False store nothing: they ask `token` again at the position of their last token, over
    the cache as it is.
    """
    config = run.config
    gms = run.groups(params)
    at = jnp.where(append, cache.next, cache.next - 1)
    length = at + 1

    def attention(layer: Layer, x: Projected, state: tuple[Segment, ...]):
        gm = gms[layer.group]
        tail = state[-1]
        assert isinstance(tail, Slots)
        k = x.k if run.rank_phase else rotary(layer, x.k, at[:, None], length)
        tail = _append(run, layer, tail, k, x.v, jnp.where(append, at, -1))
        state = (*state[:-1], tail)
        q = rotary(layer, x.q, _query_phase(run, tail.pos[layer.index], at), length)
        out, mass = _attend_segments(run, gm, layer, q, state, cache.pools, at)
        if gm.evicting:
            state = (*state[:-1], _evict(run, gm, layer, tail, mass, q, length, append))
        return out, state, None

    x, groups, _ = stack(params, token[:, None], config, attention, cache.groups)
    groups = tuple(_flush_if_full(gm, g) for gm, g in zip(gms, groups, strict=True))
    new = dataclasses.replace(cache, groups=groups, next=jnp.where(append, length, cache.next))
    return unembed(params, x[:, 0], config), new


def _query_phase(run: Run, pos: Int[Array, "B K S"], at: Int[Array, "B"]) -> Array:
    """What the query is rotated by: its position, or its rank among the live slots, per query head."""
    if not run.rank_phase:
        return at[:, None]
    live = (pos >= 0).sum(-1, dtype=jnp.int32)
    return jnp.repeat(live - 1, run.config.heads // live.shape[1], axis=1)[..., None]


def _attend_segments(
    run: Run,
    gm: GroupMethod,
    layer: Layer,
    q: Float[Array, "B N 1 H"],
    state: tuple[Segment, ...],
    pools: tuple[Pages, ...],
    at: Int[Array, "B"],
) -> tuple[Float[Array, "B N 1 V"], Float[Array, "B K S"] | None]:
    """One query over a layer's segments; also the mass on the last one where evicting needs it."""
    config, pos = run.config, at[:, None]
    sets, parts = [], []
    for i, segment in enumerate(state):
        one = segment.layer(layer.index)
        if isinstance(one, Paged):
            pool = pools[one.pool]
            part = attend_pages(
                q, one, layer.index, pool, pos, scale=config.scale, softcap=config.attention_softcap
            )
            parts.append(part)
        elif gm.read is not None and i == 0:
            sets.append(gm.read.visit(q, one, at + 1))
        else:
            sets.append(_turn_keys(run, layer, one.keys(), at + 1))
    wants = gm.evicting and wants_mass(gm)
    mass = "sum" if wants else None
    out, lse, masses = attend(
        q, sets, pos, scale=config.scale, window=layer.window, softcap=config.attention_softcap, mass=mass
    )
    if parts:
        out, _ = merge([(out, lse), *parts])
    return out, masses[-1] if wants else None


def _append(run: Run, layer: Layer, tail: Slots, k: Array, v: Array, pos: Int[Array, "B"]) -> Slots:
    k, v = _per_head(run, layer.window, k), _per_head(run, layer.window, v)
    slot = jnp.where(pos[:, None] >= 0, first_empty(tail.pos[layer.index]), -1)[None, ..., None]
    spread = jnp.broadcast_to(pos[None, :, None, None], slot.shape)
    return write_slots(tail, slot, k[None], v[None], spread, layer=layer.index)


def wants_mass(gm: GroupMethod) -> bool:
    """Whether evicting at a step needs the current query's attention."""
    assert gm.keep is not None and gm.keep.score is not None
    return any(isinstance(o, Mass | Queries) for o in gm.keep.score.needs)


def _evict(
    run: Run,
    gm: GroupMethod,
    layer: Layer,
    slots: Slots,
    mass: Float[Array, "B K S"] | None,
    q: Float[Array, "B N 1 H"],
    length: Int[Array, "B"],
    append: Bool[Array, "B"],
) -> Slots:
    """Empties (or merges away) the slot of the lowest score where a head holds more than its budget."""
    keep = gm.keep
    assert keep is not None and keep.score is not None
    one = slots.layer(layer.index)
    stats = one.stats
    if mass is not None:
        mass = jnp.where(append[:, None, None], mass, 0.0)
        stats = {n: x + mass for n, x in stats.items()}
    n = keep.budget.count(length)
    keys = one.keys()
    view = View(keys.k, keys.v, one.pos, one.bias, stats)
    seen = Seen({}, mass, length, n, layer.number, run.attention_spec(gm.first), q)
    score = keep.score(view, seen).astype(jnp.float32)
    for pattern in keep.protect:
        score = jnp.where(pattern(one.pos, length, n), jnp.inf, score)
    score = jnp.where(one.pos < 0, jnp.inf, score)
    # Ties keep the older token, as at the end of a prefill.
    lowest = score == score.min(-1, keepdims=True)
    newest = jnp.where(lowest & (one.pos >= 0), one.pos, -1).max(-1, keepdims=True)
    over = ((one.pos >= 0).sum(-1) > n[:, None]) & append[:, None]
    gone = lowest & (one.pos == newest) & over[..., None]
    if keep.merge is not None:
        victim = jnp.where(over, jnp.argmax(gone, -1), one.capacity).astype(jnp.int32)
        merged = keep.merge(view, (one.pos >= 0) & ~gone, victim[..., None], seen)
        slots = _replace_layer(slots, layer.index, k=merged.k, v=merged.v, bias=merged.bias)
    stats = {name: jnp.where(gone, 0.0, x) for name, x in stats.items()}
    pos = slots.pos.at[layer.index].set(jnp.where(gone, -1, one.pos))
    new = {name: slots.stats[name].at[layer.index].set(x) for name, x in stats.items()}
    return dataclasses.replace(slots, pos=pos, stats=new)


def _replace_layer(slots: Slots, index: int | Array, **leaves: Array) -> Slots:
    """One layer's leaves written back; merging stores encoded what the segment encodes."""

    def put(old: Any, new: Array) -> Any:
        fresh = encode(new, old.codec) if isinstance(old, Codes) else new
        return jax.tree.map(lambda x, y: x.at[index].set(y), old, fresh)

    return dataclasses.replace(slots, **{n: put(getattr(slots, n), x) for n, x in leaves.items()})


def _flush_if_full(gm: GroupMethod, group: tuple[Segment, ...]) -> tuple[Segment, ...]:
    if not gm.split:
        return group
    body, tail = group
    full = ((tail.pos >= 0).sum(-1) >= gm.residual + gm.granule).any()  # type: ignore[union-attr]
    return jax.lax.cond(full, lambda b, t: flush(gm, b, t), lambda b, t: (b, t), body, tail)


step = jax.jit(step_fn, static_argnames=("run",), donate_argnames=("cache",))
step_keeping = jax.jit(step_fn, static_argnames=("run",))
