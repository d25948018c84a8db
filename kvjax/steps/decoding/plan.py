"""Plans: which hooks a layer runs in a decode step, given the mechanisms that its method uses.

A method is lowered once per group of layers. `step_plan` is the one place that knows which mechanism needs
which hook, and in which order hooks run; the step runs the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from kvjax.compress.group import GroupMethod
from kvjax.grammar.read_kinds import Foreseeing, Prefetching, Recycling
from kvjax.models.exchange import published, takes_of
from kvjax.models.mixer import Take
from kvjax.state.cache import GroupState
from kvjax.state.code_forms import borrows
from kvjax.steps.decoding import hooks, picks, step_end
from kvjax.steps.decoding.append import append_token
from kvjax.steps.decoding.at_layer import Hook
from kvjax.steps.decoding.attend import attend
from kvjax.steps.decoding.prefetch import any_far
from kvjax.steps.decoding.recycle import attend_or_recycle, attend_prefetched
from kvjax.steps.decoding.step_end import EndHook
from kvjax.steps.shared.run import Run, taken_by

T = TypeVar("T")


class Facts(NamedTuple):
    """What a plan must know of a layer beside its method.

    publishes: the names that other layers take from it. others: whether it attends to slots or values of
    another layer. read: the group whose slots it attends to. far: whether the slots of that group are copied
    from host memory layer by layer. borrows: whether arrays of its codes are stored with the layer below.
    """

    publishes: frozenset[str]
    others: bool
    read: GroupMethod
    far: bool
    borrows: bool


class StepPlan(NamedTuple):
    """The plan of a decode step: the hooks that the layers of each group run, and those after all layers.

    layers: by group, the hooks of a layer in their order; attention is one of them. takes: by the first layer
    of a group, what the group takes from other layers for its method. far: whether
    the slots of at least one group are in host memory, from which they are copied layer by layer.
    """

    layers: tuple[tuple[Hook, ...], ...]
    end: tuple[EndHook, ...]
    takes: dict[int, dict[str, Take]]
    far: bool


def step_plan(run: Run, gms: tuple[GroupMethod, ...], groups: Sequence[GroupState]) -> StepPlan:
    """Build the plan of a method's steps over a cache of these groups."""
    takes, layers, far = _taken(gms), [], [any_far(group.parts) for group in groups]
    publishes = published(run.config, takes)
    for i, gm in enumerate(gms):
        mine = takes_of(run.config, gm.first)
        at = mine["slots"].layer if gm.kind == "reads" else gm.first
        read = next(j for j, other in enumerate(gms) if other.first == at)
        others = gm.kind == "reads" or "slot values" in mine
        names = publishes.get(gm.first, frozenset())
        facts = Facts(names, others, gms[read], far[read], borrows(groups[i]))
        layers.append(_layer_plan(run, gm, facts))
    shared = {first for first, names in publishes.items() if "slots" in names}
    return StepPlan(tuple(layers), _end(gms, shared, any(far)), takes, any(far))


def _layer_plan(run: Run, gm: GroupMethod, facts: Facts) -> tuple[Hook, ...]:
    """Build the plan of a group's layers."""
    picking, attending = _of_read(run, facts.read)
    one_turn = run.phase.steady or run.phase.one_turn
    before = chosen(
        (gm.kind != "reads", append_token),
        (gm.hiding is not None and gm.at_once, hooks.evict_what_token_hides),
        (facts.others, hooks.read_other_layers),
        (facts.borrows, hooks.complete_pair),
        (gm.sees_below or "decoded" in facts.publishes, hooks.decode_over_below),
        (facts.far, hooks.bring_layers),
        (run.unrotated, hooks.rotate_queries_and_keys),
        (not run.unrotated, hooks.rotate_queries),
        (run.on_mesh is not None, hooks.send_queries),
        (gm.answering is not None, hooks.answer_for_evicted),
        *((True, hook) for hook in picking),
        (run.unrotated and not one_turn, hooks.attend_in_other_rotations),
    )
    marks = isinstance(facts.read.read, Recycling | Prefetching)
    received = bool(facts.read.masses or gm.slot_observations) or marks
    after = chosen(
        (bool(gm.slot_observations), hooks.compare_slots_with_query),
        (received, hooks.count_stored_tokens_only),
        (bool(facts.publishes & {"slots", "logits"}), hooks.publish),
    )
    if "slots" in facts.publishes or gm.kind == "reads":
        return *before, attending, *after, hooks.leave_all_received
    carries = bool(gm.carried) or (gm.merge is not None and gm.at_once)
    evicts = gm.at_once and gm.hiding is None
    after += chosen(
        (carries, hooks.carry_rows),
        (evicts, hooks.evict),
        (carries or (received and not gm.at_once), hooks.leave_to_end),
    )
    return *before, attending, *after


def _of_read(run: Run, gm: GroupMethod) -> tuple[tuple[Hook, ...], Hook]:
    """Choose the hooks that pick slots, and the one that attends, for the group whose slots are read."""
    if gm.read is None:
        return (), attend
    if isinstance(gm.read, Recycling | Prefetching):
        return (), attend_prefetched if isinstance(gm.read, Prefetching) else attend_or_recycle
    if gm.picks:
        return (picks.pick_for_others,), attend
    finds = picks.take_picks if run.method.aligned else picks.find_picks
    first = picks.pick if gm.picker is None else finds
    return (first,) if gm.host is None else (first, picks.bring_picked), attend


def _end(gms: tuple[GroupMethod, ...], shared: set[int], far: bool) -> tuple[EndHook, ...]:
    """Choose the hooks after the layers. shared: layers whose slots others read. far: as in `StepPlan`."""
    marks = any(isinstance(gm.read, Recycling | Prefetching) for gm in gms)
    # Layers that evict at once have updated their traces themselves.
    traced = any((gm.masses or gm.slot_observations) and not gm.at_once for gm in gms)
    remembers = marks or traced or any(gm.carried or gm.merge for gm in gms)
    return chosen(
        (far, step_end.forget_brought_layers),
        (remembers, step_end.remember),
        (any(gm.at_once and gm.first in shared for gm in gms), step_end.evict_shared),
        (any(gm.evicting and not gm.at_once for gm in gms), step_end.evict_due),
        (any(gm.split for gm in gms), step_end.flush),
    )


def _taken(gms: tuple[GroupMethod, ...]) -> dict[int, dict[str, Take]]:
    """Find what groups take from other layers for their method, as `StepPlan.takes` holds it."""
    found = {gm.first: gm.picker for gm in gms if gm.picker is not None and not gm.picks}
    picks = {first: {"picks": Take("picks", picker)} for first, picker in found.items()}
    foreseen = {
        gm.first: {"foreseen": Take("mixer input", gm.first - gm.read.ahead)}
        for gm in gms
        if isinstance(gm.read, Foreseeing)
    }
    return taken_by(gms, picks, foreseen)


def chosen(*pairs: tuple[bool, T]) -> tuple[T, ...]:
    """Choose the hooks whose condition is true."""
    return tuple(hook for needed, hook in pairs if needed)
