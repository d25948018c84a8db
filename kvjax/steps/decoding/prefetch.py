"""Prefetch of slots in host memory: a layer's slots are copied while the layer below computes."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.place import by_layer
from kvjax.state.cache import GroupState, Paged, Pages, Segment, Slots
from kvjax.state.page_gather import in_layer
from kvjax.steps.decoding.past import Past


def any_far(parts: Sequence[Segment]) -> bool:
    """Whether keys and values of any part are copied layer by layer."""
    return any(isinstance(s, Slots) and s.far for s in parts)


def bring_first(groups: tuple[GroupState, ...], pools: tuple[Pages, ...]) -> tuple[GroupState, ...]:
    """Start the copy of the first layer of the first group."""
    return (_bringing(groups[0], 0, pools), *groups[1:])


def bring_next(x: Float[Array, "B T D"], state: GroupState, pools: tuple[Pages, ...]) -> GroupState:
    """Start the copy of a group's first layer, while the group below runs."""
    if not any_far(state.parts):
        return state
    # The barrier keeps the copy from starting before the group below does, or all layers would be on the
    # device at once.
    _, first = jax.lax.optimization_barrier((x, jnp.int32(0)))
    return _bringing(state, first, pools)


def next_one(state: GroupState, index: int | Array, pools: tuple[Pages, ...]) -> GroupState:
    """Start the copy of the next layer, if there is one, while the group's layer `index` attends."""
    far = [s for s in state.parts if isinstance(s, Slots) and s.far]
    if not far:
        return state
    layers = far[0].pos.shape[0]
    return without(state) if layers == 1 else _bringing(state, jnp.minimum(index + 1, layers - 1), pools)


def without(state: GroupState) -> GroupState:
    """Drop the copies of layers on the device from the group."""
    return state.with_parts([by_layer.gone(s) for s in state.parts])


def arrived(past: Past, pools: tuple[Pages, ...]) -> tuple[Past, tuple[Pages, ...]]:
    """Return the past of one layer, whose slots are now all on the device, and the pools of its pages."""
    parts: list[Segment] = []
    for s in past.parts:
        if isinstance(s, Slots):
            parts.append(by_layer.of_layer(s, past.index))
            continue
        assert s.near is not None
        one = in_layer(s.layer(past.index), pools[s.pool])
        parts.append(jax.tree.map(lambda x: x[None], one))
        pools = (*pools[: s.pool], s.near, *pools[s.pool + 1 :])
    return past._replace(parts=tuple(parts), index=0), pools


def _bringing(state: GroupState, layer: int | Array, pools: tuple[Pages, ...]) -> GroupState:
    def one(s: Segment) -> Segment:
        if isinstance(s, Paged):
            return by_layer.brought_pages(s, pools[s.pool], layer)
        return by_layer.brought(s, layer) if s.far else s

    return state.with_parts([one(s) for s in state.parts])
