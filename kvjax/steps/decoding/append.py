"""Appends a layer's new key and value to an empty slot of every KV head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.compress.sinks import after_sinks, write_sinks
from kvjax.grammar.keys import key_of
from kvjax.mesh.per_device import each_device
from kvjax.models.attending import rotated
from kvjax.ops.base.dispatch import form, kernels_may_run
from kvjax.ops.decode.stacked_decode import LANES, on_lanes, stacked_append
from kvjax.place import by_layer
from kvjax.state.cache import Slots
from kvjax.state.codes import Codes
from kvjax.state.write import first_empty, write_slots
from kvjax.steps.decoding.at_layer import AtLayer
from kvjax.steps.decoding.per_device import MeshSplit, bare, on_this_device, said_of_one, split_of
from kvjax.steps.shared.run import Run


def append_token(here: AtLayer) -> AtLayer:
    """Store the token's key and value, with the initial values of its traces."""
    gm, layer, x, token, state = here.gm, here.layer, here.x, here.token, here.state
    run, tail = token.run, state.tail
    assert x.k is not None and tail is not None
    k, v = x.k if run.unrotated else rotated(layer.rope, x.k, token.at[:, None], token.length), x.v
    if gm.copies > 1:
        k = jnp.repeat(k, gm.copies, axis=1)
        v = None if v is None else jnp.repeat(v, gm.copies, axis=1)
    traces = {}
    if gm.traces:
        inputs = here.inputs()
        traces = {key_of(t): t.start(inputs, tail.kv_heads) for t in gm.traces}
    pos = entering = jnp.where(token.append, token.at, -1)
    if state.sinks is not None:
        at = jnp.broadcast_to(pos[None, :, None, None], (1, *k.shape[:2], 1))
        first = {name: x[None] for name, x in traces.items()}
        state = write_sinks(gm, state, k[None], None if v is None else v[None], at, first, layer.index)
        entering = after_sinks(gm, state, pos)
    slot = jnp.where(entering[:, None] >= 0, first_empty(tail.pos[layer.index]), -1)
    spread = jnp.broadcast_to(entering[None, :, None, None], (1, *slot.shape, 1))
    write = partial(
        write_slots, slot=slot[None, ..., None], pos=spread, layer=layer.index,
        traces={name: x[None] for name, x in traces.items()},
    )  # fmt: skip
    if tail.far:
        return here.holding(state.with_tail(_append_far(run, tail, write, k, v, slot, layer.index)))
    split, chosen = None, "reference"
    if kernels_may_run(run.without_gpu):
        split = split_of(run.on_mesh, tail)
        chosen = said_of_one(split, partial(_form_of_append, run), bare(tail), k)
    if chosen == "reference":
        return here.holding(state.with_tail(write(tail, k=k[None], v=None if v is None else v[None])))
    new_k, new_v = _appended(split, chosen, tail, k, v, slot, layer.index)
    tail = write(dataclasses.replace(tail, k=new_k, v=new_v), k=None, v=None)
    return here.holding(state.with_tail(tail))


def _append_far(
    run: Run, tail: Slots, write: Callable[..., Slots], k: Array, v: Array | None, slot: Int[Array, "B K"],
    index: int | Array,
) -> Slots:  # fmt: skip
    """Append one token to a tail in host memory, and to the layer's copy on the device."""
    one = write(by_layer.of_layer(tail, index), k=k[None], v=None if v is None else v[None], layer=0)
    return by_layer.stored(write(tail, k=None, v=None), one, slot, index, run.on_mesh)


def _appended(
    split: MeshSplit | None, implementation: str, tail: Slots, k: Array, v: Array | None,
    slot: Int[Array, "B K"], index: int | Array,
) -> tuple[Array, Array | None]:  # fmt: skip
    """Append one row to all layers' keys and values in every KV head of one layer, on their devices."""

    def put(tail: Slots, k: Array, v: Array | None, slot: Array, index: Array) -> tuple[Array, Array | None]:
        assert not isinstance(tail.k, Codes) and not isinstance(tail.v, Codes)
        one = None if v is None else v[:, :, 0]
        mine = on_this_device(split, tail.capacity, slot)
        return stacked_append(tail.k, tail.v, k[:, :, 0], one, mine, index, implementation=implementation)

    slot = jnp.where(slot < tail.capacity, slot, -1)
    args = bare(tail), k, v, slot, jnp.asarray(index)
    if split is None:
        return put(*args)
    specs = [*split.specs(*args[:1], k)[:1], *split.of_lists(*args[1:])]
    return each_device(split.on, put, specs, (specs[0].k, specs[0].v))(*args)


def _form_of_append(run: Run, tail: Slots, new: Array) -> str:
    """How rows are written: XLA writes in place, but would re-lay out slots that are on the lanes."""
    caches = [x for x in (tail.k, tail.v) if x is not None and not isinstance(x, Codes)]
    if isinstance(tail.k, Codes) or isinstance(tail.v, Codes) or not any(map(on_lanes, caches)):
        return "reference"
    why = "" if tail.capacity % LANES == 0 else f"{tail.capacity} slots, expected a multiple of {LANES}"
    return form("append", run.without_gpu, tail, new, tpu=why)
