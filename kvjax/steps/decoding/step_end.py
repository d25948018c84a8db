"""What a decode step does after its layers: traces grow, slots are evicted, full tails are encoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float

from kvjax.state.cache import GroupState, Pages
from kvjax.state.codes import lent
from kvjax.steps.decoding import evict_due as due
from kvjax.steps.decoding import evict_now as now
from kvjax.steps.decoding import update_traces as traces
from kvjax.steps.decoding.at_layer import Token
from kvjax.steps.decoding.flush import flushed
from kvjax.steps.decoding.prefetch import without


class End(NamedTuple):
    """What the layers of a step have left.

    seen: what each group collected. x: the hidden state. lost: the rows that stored nothing, or whose slots
    could not be ranked.
    """

    token: Token
    groups: tuple[GroupState, ...]
    pools: tuple[Pages, ...]
    seen: tuple[Any, ...]
    x: Float[Array, "B 1 D"]
    lost: Bool[Array, "B"]


EndHook = Callable[[End], End]


def forget_brought_layers(end: End) -> End:
    """Frees what the device holds of layers in host memory."""
    return end._replace(groups=tuple(map(without, end.groups)))


def remember(end: End) -> End:
    """Has traces grow by what slots received, and rows carry what they carry."""
    groups, pools = traces.remember(end.token.run, end.token.gms, end.groups, end.pools, end.seen)
    return end._replace(groups=groups, pools=pools)


def evict_shared(end: End) -> End:
    """Evicts slots that several layers read, once all of them have."""
    token = end.token
    groups, lost = now.evict_shared(
        token.run, token.gms, end.groups, end.seen, token.length, token.append, end.pools
    )
    return end._replace(groups=groups, lost=end.lost | lost)


def evict_due(end: End) -> End:
    """Brings the lists of rows that are due back to their budgets."""
    token = end.token
    groups, lost = due.evict_due(
        token.run, token.gms, end.groups, token.params, token.length, token.append, end.pools
    )
    return end._replace(groups=groups, lost=end.lost | lost)


def flush(end: End) -> End:
    """Encodes the oldest granules of full tails."""
    # Fitted arrays, which a loop over rows cannot cut, come with the method.
    groups = lent(end.groups, ())
    return end._replace(groups=flushed(end.token.gms, groups, end.x, end.token.run.on_mesh))
