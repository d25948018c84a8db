"""Encodes the oldest granules of full tails into the bodies before them, for codecs of several tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.compress.below import decoded, seeing
from kvjax.compress.group import GroupMethod
from kvjax.compress.segments import flush as flush_group
from kvjax.compress.segments import flush_in_place, is_full
from kvjax.mesh.on_mesh import OnMesh
from kvjax.mesh.per_device import each_device, specs_of
from kvjax.state.axes import lie_apart, specs_of_slots
from kvjax.state.cache import GroupState, Slots
from kvjax.state.write import after


def flushed(
    gms: tuple[GroupMethod, ...], groups: tuple[GroupState, ...], x: Float[Array, "B T D"],
    on: OnMesh | None,
) -> tuple[GroupState, ...]:  # fmt: skip
    """Flush all tails as far as possible, if any is full. x: the output of the layers.

    It is one loop with one iteration or none for all groups: XLA for GPUs copies everything that passes
    through a conditional, and waits for the host at every loop whose number of iterations is data. On a mesh
    every device has a loop of its own, unless it holds only some slots of a KV head, or arrays fitted for all
    heads.
    """
    split = {i: _body_and_tail(group) for i, group in enumerate(groups) if gms[i].split}
    if not split:
        return groups

    def flushed_here(split: dict[int, tuple[Slots, Slots]], x: Array) -> dict[int, tuple[Slots, Slots]]:
        full = [is_full(gms[i], tail) for i, (_, tail) in split.items()]
        iterations = after(jnp.stack(full).any().astype(jnp.int32), x)
        return jax.lax.fori_loop(0, iterations, flush, split)

    chained = any(gm.sees_below for gm in gms)

    def flush(_: Any, split: dict[int, tuple[Slots, Slots]]) -> dict[int, tuple[Slots, Slots]]:
        if not chained:
            return {i: flush_in_place(gms[i], *parts) for i, parts in split.items()}
        out, below = {}, None
        for i, parts in split.items():
            out[i] = flush_group(seeing(gms[i], below), *parts)
            below = decoded(gms[i], out[i][0], below)
        return out

    on = on and on.with_whole_layers
    codec_arrays = any(jax.tree.leaves(gms[i].codec_arrays) for i in split)
    if on is not None and (codec_arrays or any(lie_apart(s, on) for parts in split.values() for s in parts)):
        on = None
    specs = None if on is None else {i: tuple(specs_of_slots(s, on) for s in split[i]) for i in split}
    split = each_device(on, flushed_here, (specs, specs_of(on, ("batch",), x)), specs)(split, x)
    return tuple(
        dataclasses.replace(group, bodies=(*group.bodies[:-1], split[i][0]), tail=split[i][1])
        if i in split
        else group
        for i, group in enumerate(groups)
    )


def _body_and_tail(group: GroupState) -> tuple[Slots, Slots]:
    # Pages before it are written once.
    *_, body = group.bodies
    assert isinstance(body, Slots)
    assert group.tail is not None
    return body, group.tail
