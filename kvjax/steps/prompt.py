"""Many new tokens: `observe` reads them, `settle` scores, evicts and stores; `prefill` is both, jitted."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import (
    Cache,
    Paged,
    Pages,
    Segment,
    Slots,
    gather_pages,
)
from kvjax.choose import Fresh, choose, merge_evicted, score_slots, union
from kvjax.grammar import Inputs, Method, View
from kvjax.group import GroupMethod
from kvjax.keep.observe import Mass, RawKeys
from kvjax.models.transformer import (
    Context,
    Layer,
    Params,
    Projected,
    positions,
    rotary,
    stack,
    unembed,
)
from kvjax.ops.attention import Keys, causal_attention
from kvjax.segments import build, build_group_pages, extend
from kvjax.steps.run import Run, per_head, turn_keys


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
        past = [turn_keys(run, layer, keys, context.length) for keys in past]
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
    return fresh._replace(k=per_head(run, window, k, 2), v=per_head(run, window, fresh.v, 2))


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
