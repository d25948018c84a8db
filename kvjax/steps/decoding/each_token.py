"""Attention of several new tokens of a row, each to the pages that its own query picks, as in steps."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.compress.group import GroupMethod
from kvjax.grammar.read_kinds import Foreseeing, Prefetching, Recycling
from kvjax.models.mixer import Layer, Projected
from kvjax.models.mixers.indexed_latent import IndexedLatent
from kvjax.models.transformer import Positions
from kvjax.state.cache import Cache, GroupState, Slots
from kvjax.steps.decoding.at_layer import AtLayer, StepInputs
from kvjax.steps.decoding.attend import attend
from kvjax.steps.decoding.hooks import (
    attend_in_other_rotations,
    rotate_queries,
    rotate_queries_and_keys,
)
from kvjax.steps.decoding.past import Past, past_of_others
from kvjax.steps.decoding.picks import pick
from kvjax.steps.shared.run import Run


class Shared(NamedTuple):
    """What all layers share: the run, the cache before the new tokens, and the method of every group."""

    run: Run
    cache: Cache
    gms: tuple[GroupMethod, ...]


def pass_refused(run: Run, gms: tuple[GroupMethod, ...]) -> str:
    """Say why one pass cannot pick what every token of it reads, as steps do; "" if it can."""
    reads = [gm for gm in gms if gm.read is not None]
    reasons = {
        "what a token reads depends on what the tokens before it read": any(
            isinstance(gm.read, Recycling | Prefetching) for gm in reads
        ),
        "what slots receive is recorded after every token": any(
            gm.masses or gm.slot_observations for gm in reads
        ),
        "a merge answers for evicted slots": any(gm.answering is not None for gm in reads),
        "layers read what other layers pick": any(gm.picker is not None for gm in reads),
        "layers pick by what enters the layers below": any(isinstance(gm.read, Foreseeing) for gm in reads),
        "what a token reads is copied from host memory": any(gm.host is not None for gm in reads),
        "layers attend to values of other layers": bool(reads)
        and any(mixer.source_of("slot values") is not None for mixer in run.config.mixers),
        "an indexer picks tokens before the read does": bool(reads)
        and any(isinstance(mixer, IndexedLatent) for mixer in run.config.mixers),
    }
    return next((why for why, holds in reasons.items() if holds), "")


def picks(gms: tuple[GroupMethod, ...], layer: Layer) -> bool:
    """Whether steps pick some of the slots that a layer attends to, its own or another layer's."""
    source = layer.mixer.source_of("slots")
    owners = [gms[layer.group]] if source is None else [gm for gm in gms if gm.first == source]
    return any(gm.read is not None for gm in owners)


def attend_each(
    shared: Shared,
    layer: Layer,
    x: Projected,
    new: tuple[Float[Array, "B K T F"] | None, Float[Array, "B K T V"] | None],
    state: GroupState,
    at: Positions,
) -> Float[Array, "B N T V"]:
    """Attend to the slots that every token's query picks, and to the new tokens up to its own.

    new: the layer's keys and values as they will be stored. state: what its group holds. Every token attends
    over a tail in which the new tokens up to it are stored, as they are in its step.
    """
    gm = shared.gms[layer.group]
    past, (k, v) = Past(gm, layer.index, state.parts), new
    if (slots := layer.taken.get("slots")) is not None:
        past, k, v = past_of_others(shared.gms, gm, layer, state), slots.k, slots.v
    assert k is not None
    past = _of_one_layer(past)
    longer = _longer(past.gm, past.tail, k, v)

    def one(t: Array) -> Array:
        cut = lambda a, axis: jax.lax.dynamic_slice_in_dim(a, t, 1, axis)  # noqa: E731
        pos = jnp.maximum(cut(at.pos, 1)[:, 0], 0)  # padding, too, attends to something
        stored = jnp.where(at.pos <= pos[:, None], at.pos, -1)
        tail = dataclasses.replace(longer, pos=_with(past.tail.pos, stored))
        token = StepInputs(shared.run, {}, shared.cache, shared.gms, None, pos, pos + 1, pos >= 0)
        mine = x._replace(q=cut(x.q, 2), k=None, v=None, hidden=cut(x.hidden, 1))
        over = past._replace(parts=(*past.parts[:-1], tail))
        here = AtLayer(token, gm, layer, mine, mine.q, state, over, shared.cache.pools)
        rotate = rotate_queries_and_keys if shared.run.unrotated else rotate_queries
        here = attend(attend_in_other_rotations(pick(rotate(here))))
        assert here.out is not None
        return here.out[:, :, 0]

    return jnp.moveaxis(jax.lax.map(one, jnp.arange(at.pos.shape[1])), 0, 2)


def _of_one_layer(past: Past) -> Past:
    """Cut the parts to the layer that is read."""
    one = lambda x: jax.lax.dynamic_slice_in_dim(x, past.index, 1)  # noqa: E731
    parts = tuple(jax.tree.map(one, part) for part in past.parts)
    return past._replace(gm=past.gm.of_layer(past.index), index=0, parts=parts)


def _longer(gm: GroupMethod, tail: Slots, k: Array, v: Array | None) -> Slots:
    """Append the new tokens' keys and values to a tail; `_with` appends their positions."""

    def joined(old: Array, new: Array) -> Array:
        new = jnp.repeat(new, gm.copies, axis=1) if gm.copies > 1 else new
        return jnp.concatenate([old, new[None].astype(old.dtype)], axis=3)

    assert isinstance(tail.k, Array)
    more = [(0, 0)] * 3 + [(0, k.shape[2])]
    pad = lambda x: jnp.pad(x, more)  # noqa: E731
    values = tail.v if tail.v is None or v is None else joined(tail.v, v)  # type: ignore[arg-type]
    bias = None if tail.bias is None else pad(tail.bias)
    traces = {name: pad(x) for name, x in tail.traces.items()}
    return dataclasses.replace(tail, k=joined(tail.k, k), v=values, bias=bias, traces=traces)


def _with(pos: Int[Array, "1 B K S"], new: Int[Array, "B T"]) -> Int[Array, "1 B K S_T"]:
    """Append positions of new tokens to those of a tail's slots."""
    shape = (*pos.shape[:3], new.shape[-1])
    return jnp.concatenate([pos, jnp.broadcast_to(new[None, :, None], shape)], axis=3)
