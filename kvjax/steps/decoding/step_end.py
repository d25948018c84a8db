"""The end of a decode step: traces are updated, slots are evicted, full tails are encoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float

from kvjax.state.cache import GroupState, Pages
from kvjax.state.codes import with_arrays
from kvjax.steps.decoding import evict_due as due
from kvjax.steps.decoding import evict_now as now
from kvjax.steps.decoding import update_traces as traces
from kvjax.steps.decoding.at_layer import StepInputs
from kvjax.steps.decoding.flush import flushed
from kvjax.steps.decoding.prefetch import without


class StepOutputs(NamedTuple):
    """The results of a step's layers.

    seen: the records of each group. x: the hidden state. lost: the rows that stored nothing, or whose slots
    could not be ranked.
    """

    token: StepInputs
    groups: tuple[GroupState, ...]
    pools: tuple[Pages, ...]
    seen: tuple[Any, ...]
    x: Float[Array, "B 1 D"]
    lost: Bool[Array, "B"]


EndHook = Callable[[StepOutputs], StepOutputs]


def forget_brought_layers(end: StepOutputs) -> StepOutputs:
    """Free the device's copies of layers in host memory."""
    return end._replace(groups=tuple(map(without, end.groups)))


def remember(end: StepOutputs) -> StepOutputs:
    """Update traces by what slots received, and what rows carry."""
    groups, pools = traces.remember(end.token.run, end.token.gms, end.groups, end.pools, end.seen)
    return end._replace(groups=groups, pools=pools)


def evict_shared(end: StepOutputs) -> StepOutputs:
    """Evict from slots that several layers read, after the last reader."""
    token = end.token
    groups, lost = now.evict_shared(
        token.run, token.gms, end.groups, end.seen, token.length, token.append, end.pools
    )
    return end._replace(groups=groups, lost=end.lost | lost)


def evict_due(end: StepOutputs) -> StepOutputs:
    """Evict down to the budget in rows that are due."""
    token = end.token
    groups, lost = due.evict_due(
        token.run, token.gms, end.groups, token.params, token.length, token.append, end.pools
    )
    return end._replace(groups=groups, lost=end.lost | lost)


def flush(end: StepOutputs) -> StepOutputs:
    """Encode the oldest granules of full tails."""
    # Fitted arrays come with the method, since a loop over rows cannot slice them.
    groups = with_arrays(end.groups, ())
    return end._replace(groups=flushed(end.token.gms, groups, end.x, end.token.run.on_mesh))
