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

from kvjax.cache import Cache, Paged, Segment, Slots, first_empty, gather_pages, write_slots
from kvjax.compress import (
    Fresh,
    GroupMethod,
    build,
    build_group_pages,
    choose,
    extend,
    flush,
    group_method,
    score_slots,
    union,
)
from kvjax.grammar import AttentionSpec, Inputs, Method, Seen, View
from kvjax.keep.observe import Mass, Queries
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


class Run(NamedTuple):
    """What is static in a run: equal values share compiled programs."""

    config: Config
    method: Method

    def groups(self, params: Params) -> tuple[GroupMethod, ...]:
        out, first = [], 0
        for p in params["layers"]:
            out.append(group_method(self.method, first, self.config.window(first)))
            first += next(iter(p.values())).shape[0]
        return tuple(out)

    @property
    def rank_phase(self) -> bool:
        return self.method.keep is not None and self.method.keep.rank_phase

    @property
    def per_query_head(self) -> bool:
        return self.method.keep is not None and self.method.keep.per_query_head

    def attention_spec(self) -> AttentionSpec:
        c = self.config
        return AttentionSpec(c.scale, c.attention_softcap, None)  # type: ignore[arg-type]


# --- phases ------------------------------------------------------------------------------------------


def _ranks_by_position(pos: Int[Array, "B K S"]) -> Int[Array, "B K S"]:
    """How many live slots hold an older token: the phase of StreamingLLM's cache-relative rotation."""
    order = jnp.argsort(jnp.where(pos < 0, jnp.iinfo(jnp.int32).max, pos), axis=-1)
    return jnp.argsort(order, axis=-1).astype(jnp.int32)


def _turn_keys(run: Run, layer: Layer, keys: Keys, length: Array) -> Keys:
    if not run.rank_phase:
        return keys
    return keys._replace(k=rotary(layer, keys.k, _ranks_by_position(keys.pos), length))


def _per_head(run: Run, layer_window: int | None, x: Array) -> Array:
    """Keys or values repeated for every query head where the method selects per query head."""
    if not run.per_query_head or layer_window is not None:
        return x
    return jnp.repeat(x, run.config.heads // x.shape[1], axis=1)


# --- prefill -----------------------------------------------------------------------------------------


class Prompt(NamedTuple):
    """Everything a prefill computed, before anything was compressed: one Fresh per group."""

    fresh: tuple[Fresh, ...]
    context: Context
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
    pool = None if cache is None else cache.pool
    reduce = next((o.reduce for o in needs if isinstance(o, Mass)), None)

    def attention(layer: Layer, x: Projected, state: tuple[Segment, ...]):
        past = [_keys(s, layer.index, pool) for s in state]
        phase = context.pos
        if run.rank_phase and past:
            live = (past[-1].pos >= 0).sum(-1, dtype=jnp.int32)
            phase = live[..., None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, None]
        group = config.heads // config.kv_heads
        q = rotary(layer, x.q, jnp.repeat(phase, group, axis=1) if phase.ndim == 3 else phase, context.length)
        k = rotary(layer, x.k, phase, context.length)
        new = Keys(_per_head(run, layer.window, k), _per_head(run, layer.window, x.v), context.pos[:, None])
        past = [_turn_keys(run, layer, keys, context.length) for keys in past]
        out, masses = causal_attention(
            q, new, past, context.pos,
            scale=config.scale, window=layer.window, softcap=config.attention_softcap, mass=reduce,
        )  # fmt: skip
        inputs = Inputs(q, x.q, x.hidden, context.pos, context.length)
        observed = {o: o(inputs) for o in needs if not isinstance(o, Mass)}
        stored = _per_head(run, layer.window, x.k) if run.rank_phase else new.k
        return out, state, Fresh(stored, new.v, observed, masses)

    x, _, fresh = stack(params, tokens, config, attention, states)
    last = jnp.maximum(lengths - 1, 0)
    logits = unembed(params, jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0], config)
    return Prompt(fresh, context, logits)


def _keys(segment: Segment, index: int | Array, pool: Any) -> Keys:
    one = segment.layer(index)
    return gather_pages(one, pool) if isinstance(one, Paged) else one.keys()


def needs_of(gms: tuple[GroupMethod, ...]) -> frozenset:
    """All observations that the keeps of a model's groups ask for."""
    out: frozenset = frozenset()
    for gm in gms:
        if gm.keep is not None and gm.keep.score is not None:
            out |= gm.keep.score.needs
    return out


def settle(
    run: Run, params: Params, prompt: Prompt, cache: Cache | None, *, tokens: int, room: int, compress: bool
) -> Cache:
    """From what a prefill computed to the cache it leaves.

    tokens bounds how many tokens any row has seen (static). With compress=False, or where a group keeps
    everything, new tokens are added and nothing is evicted; windowed layers always keep their window.
    """
    gms = run.groups(params)
    length = prompt.context.length
    pos = prompt.context.pos
    views: list[View | None] = []
    scores: list[Array | None] = []
    for i, gm in enumerate(gms):
        past = () if cache is None else cache.groups[i]
        windowed = run.config.window(gm.first) is not None
        if past and not (gm.keep is not None and (compress or windowed)):
            views.append(None)
            scores.append(None)
            continue
        stats = gm.keep.score.stats if gm.keep is not None and gm.keep.score is not None else frozenset()
        view = union(past, None if cache is None else cache.pool, prompt.fresh[i], pos, stats)
        views.append(view)
        use = gm.keep is not None and (compress or windowed)
        scores.append(
            score_slots(gm, view, prompt.fresh[i], length, gm.keep.budget.count(length), run.attention_spec())
            if use and gm.keep is not None
            else None
        )
    kept = choose(
        tuple(g if s is not None else g._replace(keep=None) for g, s in zip(gms, scores, strict=True)),
        tuple(scores),
        length,
    )

    groups: list[tuple[Segment, ...] | None] = [None] * len(gms)
    pool = None if cache is None else cache.pool
    paged = [i for i, gm in enumerate(gms) if gm.paged and views[i] is not None and kept[i] is not None]
    if paged:
        some, pool = build_group_pages(
            tuple(gms[i] for i in paged), tuple(views[i] for i in paged), tuple(kept[i] for i in paged),  # type: ignore[misc]
            tokens, room, gms[paged[0]].keep.page,  # type: ignore[union-attr]
        )  # fmt: skip
        for i, group in zip(paged, some, strict=True):
            groups[i] = group
    for i, gm in enumerate(gms):
        view = views[i]
        if groups[i] is not None:
            continue
        if view is None:
            groups[i] = extend(gm, cache.groups[i], prompt.fresh[i], pos)  # type: ignore[union-attr]
        else:
            # A keep that was not asked to act yet leaves everything, with its own room behind.
            use = gm if scores[i] is not None else gm._replace(keep=None)
            groups[i] = build(use, view, kept[i], tokens, room)
    return Cache(tuple(groups), length, pool)  # type: ignore[arg-type]


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
    needs = needs_of(run.groups(params)) if compress else frozenset()
    prompt = observe(run, params, tokens, lengths, cache, needs)
    new = settle(run, params, prompt, cache, tokens=tokens_bound, room=room, compress=compress)
    return prompt.logits, new


# --- one token ---------------------------------------------------------------------------------------


def step_fn(
    run: Run, params: Params, cache: Cache, token: Int[Array, "B"], active: Bool[Array, "B"], append: bool
) -> tuple[Float[Array, "B V"], Cache]:
    """One token per row: append it, attend, evict. Inactive rows change nothing and their logits are void.

    append=False asks `token` again at the position of the last token, over the cache as it is.
    """
    config = run.config
    gms = run.groups(params)
    at = cache.next if append else cache.next - 1
    write_pos = jnp.where(active, at, -1)
    length = at + 1

    def attention(layer: Layer, x: Projected, state: tuple[Segment, ...]):
        gm = gms[layer.group]
        tail = state[-1]
        assert isinstance(tail, Slots)
        k = x.k if run.rank_phase else rotary(layer, x.k, at[:, None], length)
        if append:
            tail = _append(run, layer, tail, k, x.v, write_pos)
        live = (tail.pos[layer.index] >= 0).sum(-1, dtype=jnp.int32)
        group = config.heads // live.shape[1]
        phase = jnp.repeat(live - 1, group, axis=1)[..., None] if run.rank_phase else at[:, None]
        q = rotary(layer, x.q, phase, length)
        sets, parts = [], []
        for segment in (*state[:-1], tail):
            if isinstance(segment, Paged):
                parts.append(
                    attend_pages(
                        q,
                        segment.layer(layer.index),
                        layer.index,
                        cache.pool,
                        at[:, None],  # type: ignore[arg-type]
                        scale=config.scale,
                        softcap=config.attention_softcap,
                    )  # fmt: skip
                )
            elif gm.read is not None and segment is not tail:
                sets.append(gm.read.visit(q, segment.layer(layer.index), length))
            else:
                sets.append(_turn_keys(run, layer, segment.layer(layer.index).keys(), length))
        wants = gm.evicting and wants_mass(gm)
        out, lse, masses = attend(
            q, sets, at[:, None],
            scale=config.scale, window=layer.window, softcap=config.attention_softcap, mass="sum" if wants else None,
        )  # fmt: skip
        if parts:
            out, _ = merge([(out, lse), *parts])
        if gm.evicting and append:
            tail = _evict(run, gm, layer, tail, masses[-1] if wants else None, length, active)
        return out, (*state[:-1], tail), None

    x, groups, _ = stack(params, token[:, None], config, attention, cache.groups)
    logits = unembed(params, x[:, 0], config)
    if append:
        groups = tuple(_flush_if_full(gm, g) for gm, g in zip(gms, groups, strict=True))
    return logits, dataclasses.replace(
        cache, groups=groups, next=jnp.where(active, length, cache.next) if append else cache.next
    )


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
    run: Run, gm: GroupMethod, layer: Layer, slots: Slots, mass: Array | None, length: Array, active: Array
) -> Slots:
    """Empties the slot with the lowest score where a head holds more than its budget."""
    keep = gm.keep
    assert keep is not None and keep.score is not None
    one = slots.layer(layer.index)
    stats = one.stats
    if mass is not None:
        mass = jnp.where(active[:, None, None], mass, 0.0)
        stats = {n: x + mass for n, x in stats.items()}
    n = keep.budget.count(length)
    keys = one.keys()
    view = View(keys.k, keys.v, one.pos, one.bias, stats)
    score = keep.score(view, Seen({}, mass, length, n, layer.number, run.attention_spec())).astype(
        jnp.float32
    )
    for pattern in keep.protect:
        score = jnp.where(pattern(one.pos, length, n), jnp.inf, score)
    score = jnp.where(one.pos < 0, jnp.inf, score)
    # Ties keep the older token, as at the end of a prefill.
    lowest = score == score.min(-1, keepdims=True)
    newest = jnp.where(lowest & (one.pos >= 0), one.pos, -1).max(-1, keepdims=True)
    over = ((one.pos >= 0).sum(-1) > n[:, None]) & active[:, None]
    gone = lowest & (one.pos == newest) & over[..., None]
    index = layer.index
    return dataclasses.replace(
        slots,
        pos=slots.pos.at[index].set(jnp.where(gone, -1, one.pos)),
        stats={name: slots.stats[name].at[index].set(jnp.where(gone, 0.0, x)) for name, x in stats.items()},
    )


def _flush_if_full(gm: GroupMethod, group: tuple[Segment, ...]) -> tuple[Segment, ...]:
    if not gm.split:
        return group
    body, tail = group
    full = ((tail.pos >= 0).sum(-1) >= gm.residual + gm.granule).any()  # type: ignore[union-attr]
    return jax.lax.cond(full, lambda b, t: flush(gm, b, t), lambda b, t: (b, t), body, tail)


step = jax.jit(step_fn, static_argnames=("run", "append"), donate_argnames=("cache",))
step_keeping = jax.jit(step_fn, static_argnames=("run", "append"))
