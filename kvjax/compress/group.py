"""Groups: what a method means for one run of equal layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
from jaxtyping import Array

from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.calls import counts_slots, hiding_of, observations, step_score, written
from kvjax.grammar.fitted import fitted_words, learns, sees_below
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Answering, Carried, CarryingMerge, Hiding, SlotObservation, Trace
from kvjax.grammar.model_kinds import Stacking
from kvjax.grammar.read_kinds import LearningFromQueries, Prefetching, Recycling, Remembering, Tracing
from kvjax.grammar.sentence import read_after
from kvjax.grammar.when import STEP
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.observations.observe import Mass, Queries
from kvjax.keep.scores.score import Position
from kvjax.models.stacking import Group
from kvjax.ops.base.rope import Rope
from kvjax.state.code_forms import is_steady
from kvjax.state.codes import CodecArrays, at_layer

# What a caller of the pure functions does about a method that treats stacked layers differently.
UNSTACK = "give the params of kvjax.prepare(model, method), which takes them apart"


@dataclasses.dataclass(frozen=True)
class GroupMethod:
    """What a method means for one group of layers; derived properties are computed once.

    shared: how many channels of the keys are the values, which are then not stored; None if values are
    stored. kind: "slots", "state" (the layers carry a recurrent state; codecs[0] encodes its matrices),
    "fixed" (their slots are a context, such as an encoder's, to which tokens add nothing) or "reads" (they
    read another layer's slots and have none). sinks: how many first tokens are stored unencoded beside codes.
    codec_arrays: inside a program, the fitted and learnt arrays of the codecs
    (`kvjax.steps.shared.fitted_arrays`).
    stack: how a prefill merges the layer with a neighbouring layer; `upper` is the upper one of the two.
    host: which part of a body in host memory is also on the device. picker: the layer whose choice of pages a
    read uses; the group's own first layer if it chooses for the layers above. multiple: the number of slots
    per KV head is a multiple of this number of devices. grows: the parts of a state that grow with tokens, as
    slots do; such states are not encoded. rope: how keys that are stored unrotated are rotated before a read
    ranks them; None if they are stored rotated. read_prompt: which blocks of a first prompt queries attend
    to. stride: how far apart the layers are; 1 unless they are one kind of a pattern of layers.
    """

    keep: Keep | None
    codecs: tuple[Any, Any]
    granule: int
    residual: int
    read: Any
    first: int
    shared: int | None = None
    kind: str = "slots"
    sinks: int = 0
    codec_arrays: CodecArrays | tuple[()] = ()
    stack: Stacking | None = None
    upper: bool = False
    host: Any = None
    picker: int | None = None
    multiple: int = 1
    grows: frozenset[str] = frozenset()
    rope: Rope | None = None
    read_prompt: Any = None
    stride: int = 1

    def number(self, index: Any) -> Any:
        """The number of the group's layer `index`, an int or an array of them."""
        return self.first + self.stride * index

    def stacked(self, count: int) -> Group:
        """The same group with `count` layers."""
        return Group(self.first, count, self.stride)

    @cached_property
    def picks(self) -> bool:
        """Whether the layer chooses pages for the layers above it, and reads all of its own slots."""
        return self.picker == self.first

    @cached_property
    def budget(self) -> Budget | None:
        """How many slots of a prompt stay beside those that are merged; None if all stay."""
        if self.stack is not None:
            return self.stack.most
        return None if self.keep is None else self.keep.budget

    @cached_property
    def paged(self) -> bool:
        return self.keep is not None and not self.keep.allocate.uniform

    @cached_property
    def codecs_of_new(self) -> tuple[Any, Any]:
        """The codecs of the slots that new tokens enter; a tail after an encoded body is unencoded."""
        return (None, None) if self.split else self.codecs

    @cached_property
    def evicting(self) -> bool:
        """Whether decode steps evict slots."""
        return self.keep is not None and self.keep.when.in_steps

    @cached_property
    def at_once(self) -> bool:
        """Whether a slot may be evicted after every token, inside the layer."""
        return self.keep is not None and self.keep.when.at_once

    @cached_property
    def hiding(self) -> Hiding | None:
        """The word that hides slots from later tokens before a layer attends; None if there is none."""
        return hiding_of(self.keep)

    @cached_property
    def rewrites(self) -> bool:
        """Whether decode steps change keys or values of stored tokens: by merges, or in a second tier."""
        keep = self.keep
        if keep is None or not self.evicting:
            return False
        return keep.lower is not None or bool({"k", "v"} & {*written(keep.merge)})

    @cached_property
    def rated(self) -> bool:
        """Whether decode steps keep the group's dense slots at a budget, rather than evict by a threshold."""
        return self.evicting and not self.paged and not counts_slots(self.keep)

    @cached_property
    def lasting(self) -> bool:
        """Whether decode steps only add slots and change none, so that copies of a row can share slots."""
        apart = self.split or self.sinks or self.stack is not None or self.host is not None
        unsteady = self.keep is not None and not self.keep.phase.steady
        return self.kind == "slots" and not (self.evicting or apart or unsteady or self.traces)

    @cached_property
    def traces_of_keep(self) -> frozenset[Trace]:
        """The per-slot traces that the keep needs."""
        score = None if self.keep is None else self.keep.score
        return frozenset() if score is None else frozenset(score.traces)

    @cached_property
    def traces(self) -> tuple[Trace, ...]:
        """The per-slot traces that the group's slots carry."""
        found = {*self.traces_of_keep}
        found |= {*self.read.traces} if isinstance(self.read, Remembering) else set()
        found |= {self.read.mark} if isinstance(self.read, Recycling | Prefetching) else set()
        found |= {*self.read.marks} if isinstance(self.read, Tracing) else set()
        return tuple(sorted(found, key=key_of))

    @cached_property
    def asks(self) -> Queries | None:
        """The prompt's newest queries, from which its read learns; None if it learns from none."""
        return Queries(self.read.asks) if isinstance(self.read, LearningFromQueries) else None

    @cached_property
    def slot_observations(self) -> tuple[SlotObservation, ...]:
        """The numbers that are computed from slots and new queries together, for the traces."""
        asked = {o for trace in self.traces for o in trace.needs if isinstance(o, SlotObservation)}
        return tuple(sorted(asked, key=key_of))

    @cached_property
    def carried(self) -> tuple[Carried, ...]:
        """What every row carries from step to step: observations of more than the newest token."""
        if self.keep is None or not self.evicting:
            return ()
        found = [o for o in observations(self.keep, in_steps=True) if isinstance(o, Carried)]
        # Inside a token's own step its query is available, so rows need not carry it.
        return tuple(o for o in found if not (self.at_once and o == Queries(1)))

    @cached_property
    def learns(self) -> tuple[Carried, ...]:
        """What rows learn from their prompts for the codecs."""
        return tuple(sorted(learns(self.codecs), key=key_of))

    @cached_property
    def sees_below(self) -> bool:
        """Whether its codecs look at the layer below."""
        return sees_below(self.codecs)

    @cached_property
    def merge(self) -> CarryingMerge | None:
        """The keep's merge, if rows carry something for it."""
        merge = None if self.keep is None else self.keep.merge
        return merge if isinstance(merge, CarryingMerge) else None

    @cached_property
    def answering(self) -> Answering | None:
        """The keep's merge, if it answers queries for evicted slots."""
        return self.merge if isinstance(self.merge, Answering) else None

    @cached_property
    def masses(self) -> tuple[Mass, ...]:
        """The attention reductions that a decode step records for its query."""
        if self.keep is None or self.keep.score is None:
            return ()
        asked = {o for trace in self.traces for o in trace.needs if isinstance(o, Mass)}
        if self.at_once:
            asked |= {o for o in observations(self.keep, in_steps=True) if isinstance(o, Mass)}
            if Queries(1) in step_score(self.keep.score).needs:
                asked.add(Mass("sum"))
        return tuple(sorted(asked, key=key_of))

    def replaced(self, **fields: Any) -> GroupMethod:
        """A copy with other fields."""
        return dataclasses.replace(self, **fields)

    def of_layer(self, index: Array, row: Array | None = None) -> GroupMethod:
        """A group of one layer, with the fitted arrays of that layer; for all rows, or for one."""
        one = lambda x: jax.lax.dynamic_slice_in_dim(x, index, 1)  # noqa: E731
        codec_arrays = jax.tree.map(one, dict(self.codec_arrays))
        if row is not None:
            for name in map(key_of, self.learns):
                cut = lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1, 1)  # noqa: E731
                codec_arrays[name] = jax.tree.map(cut, codec_arrays[name])
        return self.replaced(codec_arrays=codec_arrays)

    @cached_property
    def split(self) -> bool:
        """Whether new tokens go to an unencoded tail after an encoded body, rather than into one segment."""
        return self.granule > 1 or self.residual > 0 or self.read is not None


def strides_of(gms: Sequence[GroupMethod]) -> tuple[int, ...]:
    """How far apart the layers of each group are; empty if they are neighbours in all."""
    return tuple(gm.stride for gm in gms) if any(gm.stride > 1 for gm in gms) else ()


def group_method(
    method: Method, layers: range, window: int | None, shared: int | None = None, kind: str = "slots"
) -> GroupMethod:
    """The part of a method that some layers, stacked as one group, follow.

    Windowed layers keep exactly their window (all of it, so that the last token can be read again), recurrent
    layers keep their state, and layers of a context keep the context. Codecs that encode token by token
    encode all three, except a window or a state in which repeated encoding would drift, and a state or a
    context for which codecs were not fitted. The first `skip_layers` layers keep everything.
    """
    first, last = layers[0], layers[-1]
    if len({method.at(i) for i in layers}) > 1:
        raise ValueError(
            f"{method.id}: the stacked layers {first} to {last} follow several sentences: {UNSTACK}"
        )
    method = method.at(first)
    keep, store, read = method.keep, method.store, method.read
    codecs = _codecs(method, layers)
    # One for all encoded layers, since a layer may be decoded over the one below.
    granule = 1 if store is None or codecs == (None, None) else store.granule
    residual = 0 if store is None else store.residual
    if kind == "reads":
        return GroupMethod(None, (None, None), 1, 0, None, first, shared, kind, stride=layers.step)
    if window is not None or kind in ("state", "fixed"):
        # A state is decoded and encoded again at every token, and a window at every prefill.
        drifts = kind != "fixed" and not all(map(is_steady, codecs))
        foreign = window is None and any(True for codec in codecs for _ in fitted_words(codec))
        plain = (None, None) if granule > 1 or residual > 0 or drifts or foreign else codecs
        rule = None if window is None else Keep(Position(), Budget(window), Uniform(), when=STEP)
        return GroupMethod(rule, plain, 1, 0, None, first, shared, kind, stride=layers.step)
    sparse = method.read_prompt
    for part in (keep, read, sparse):
        if part is not None and first < part.skip_layers <= last:
            raise ValueError(
                f"{method.id}: skip_layers={part.skip_layers} ends inside the stacked layers {first} to "
                f"{last}: use {first} or {last + 1}, or {UNSTACK}"
            )
    if keep is not None and (first < keep.skip_layers or keep.score is None):
        keep = None
    if read is not None and first < read.skip_layers:
        read = None
    if sparse is not None and first < sparse.skip_layers:
        sparse = None
    if read is not None:
        read = read_after(keep, read)
        granule, residual = math.lcm(granule, read.granule), max(residual, read.newest)
    sinks = store.sinks if store is not None and codecs != (None, None) else 0
    # Layers to which the read does not apply stay on the device.
    host = method.host if (read is None) == (method.read is None) else None
    return GroupMethod(
        keep, codecs, granule, residual, read, first, shared, sinks=sinks, host=host, read_prompt=sparse,
        stride=layers.step,
    )  # fmt: skip


def _codecs(method: Method, layers: range) -> tuple[Any, Any]:
    """The codecs of keys and values of some layers."""
    store = method.store
    if store is None:
        return None, None
    found = {(at_layer(store.keys, i), at_layer(store.values, i)) for i in layers}
    if len(found) > 1:
        raise ValueError(
            f"{method.id}: the stacked layers {layers[0]} to {layers[-1]} are stored in several ways: "
            f"{UNSTACK}"
        )
    return found.pop()
