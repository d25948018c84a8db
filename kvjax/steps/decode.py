"""One new token per row: append it, attend, evict, flush."""

from __future__ import annotations

import dataclasses
from typing import Any

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
    write_slots,
)
from kvjax.grammar import Seen, View
from kvjax.group import GroupMethod
from kvjax.keep.observe import Mass, Queries
from kvjax.models.transformer import (
    Layer,
    Params,
    Projected,
    rotary,
    stack,
    unembed,
)
from kvjax.ops.attention import attend, merge
from kvjax.place.paged import attend_pages
from kvjax.segments import flush
from kvjax.steps.run import Run, per_head, turn_keys


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
            sets.append(turn_keys(run, layer, one.keys(), at + 1))
    wants = gm.evicting and wants_mass(gm)
    mass = "sum" if wants else None
    out, lse, masses = attend(
        q, sets, pos, scale=config.scale, window=layer.window, softcap=config.attention_softcap, mass=mass
    )
    if parts:
        out, _ = merge([(out, lse), *parts])
    return out, masses[-1] if wants else None


def _append(run: Run, layer: Layer, tail: Slots, k: Array, v: Array, pos: Int[Array, "B"]) -> Slots:
    k, v = per_head(run, layer.window, k), per_head(run, layer.window, v)
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
