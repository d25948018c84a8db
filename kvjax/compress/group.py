"""Groups: what a method means for one run of equal layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jaxtyping import Array

from kvjax.compress.computed_keys import ComputedKeys
from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.calls import counts_slots, hiding_of, observations, written
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
from kvjax.ops.base.rope import Rope
from kvjax.state.code_forms import is_steady
from kvjax.state.codes import CodecArrays, at_layer

# What a caller of the pure functions does about a method that treats stacked layers differently.
UNSTACK = "give the params of kvjax.prepare(model, method), which takes them apart"


def _derived() -> Any:
    """Declare a field that `GroupMethod` computes from the others."""
    return dataclasses.field(init=False, repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class GroupMethod:
    """What a method means for one group of layers, and what follows from that, computed once.

    shared: how many channels of the keys are the values, which are then not stored; None if values are
    stored. kind: "slots", "state" (the layers carry a recurrent state; codecs[0] encodes its matrices),
    "fixed" (their slots are a context, such as an encoder's, to which tokens add nothing) or "reads" (they
    read another layer's slots and have none). sinks: how many first tokens are stored unencoded beside codes.
    codec_arrays: inside a program, the fitted and learnt arrays of the codecs, and the read's fitted ones
    (`kvjax.steps.shared.fitted_arrays`).
    stack: how a prefill merges the layer with a neighbouring layer; `upper` is the upper one of the two.
    host: which part of a body in host memory is also on the device. picker: the layer whose choice of pages a
    read uses; the group's own first layer if it chooses for the layers above. multiple: the number of slots
    per KV head is a multiple of this number of devices. grows: the parts of a state that grow with tokens, as
    slots do; such states are not encoded. rope: how keys that are stored unrotated are rotated before a read
    ranks them; None if they are stored rotated. computed: how keys are computed from what is stored before a
    read ranks them; None if they are stored. read_prompt: which blocks of a first prompt queries attend to.
    stride: how far apart the layers are; 1 unless they are one kind of a pattern of layers. copies: how many
    KV heads every stored one becomes, because the method selects for each query head alone; 1 for most.

    Computed from these: same: all of them but `first`, so that equal groups have equal ones. alone: whether
    the layer gives something to a neighbour, or takes it, so that it cannot be stacked. picks: whether the
    layer chooses pages for the layers above it, and reads all of its own slots. budget: how many slots of a
    prompt stay beside those that are merged; None if all stay. split: whether new tokens go to an unencoded
    tail after an encoded body, rather than into one segment. paged: whether heads have unequal budgets.
    evicting: whether decode steps evict slots; at_once: whether after every token, inside the layer; rated:
    whether they keep dense slots at a budget, rather than evict by a threshold. traces: what slots carry,
    traces_of_keep: for the keep's score alone. masses and slot_observations: what a decode step records of
    attention, and computes from slots and the query, for them. carried: what every row carries from step to
    step. asks: the prompt's newest queries, from which the read learns. hiding: the word that hides slots
    from later tokens before a layer attends. merge: the keep's merge, if rows carry something for it;
    answering: if it also answers queries for evicted slots. fitted: whether its codecs have fitted arrays.
    learns: what rows learn from their prompts for the codecs. sees_below: whether the codecs look at the
    layer below.
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
    computed: ComputedKeys | None = None
    read_prompt: Any = None
    stride: int = 1
    copies: int = 1

    same: tuple[Any, ...] = _derived()
    alone: bool = _derived()
    picks: bool = _derived()
    budget: Budget | None = _derived()
    split: bool = _derived()
    paged: bool = _derived()
    evicting: bool = _derived()
    at_once: bool = _derived()
    rated: bool = _derived()
    traces_of_keep: frozenset[Trace] = _derived()
    traces: tuple[Trace, ...] = _derived()
    masses: tuple[Mass, ...] = _derived()
    slot_observations: tuple[SlotObservation, ...] = _derived()
    carried: tuple[Carried, ...] = _derived()
    asks: Queries | None = _derived()
    hiding: Hiding | None = _derived()
    merge: CarryingMerge | None = _derived()
    answering: Answering | None = _derived()
    fitted: bool = _derived()
    learns: tuple[Carried, ...] = _derived()
    sees_below: bool = _derived()

    def __post_init__(self):
        keep, read, put = self.keep, self.read, partial(object.__setattr__, self)
        compared = (f.name for f in dataclasses.fields(self) if f.compare and f.name != "first")
        put("same", tuple(getattr(self, name) for name in compared))
        put("picks", self.picker == self.first)
        put("split", self.granule > 1 or self.residual > 0 or read is not None)
        own = None if keep is None else keep.budget
        put("budget", own if self.stack is None else self.stack.most)
        put("paged", keep is not None and not keep.allocate.uniform)
        put("evicting", keep is not None and keep.when.in_steps)
        put("at_once", keep is not None and keep.when.at_once)
        put("rated", self.evicting and not self.paged and not counts_slots(keep))
        merge = None if keep is None or not isinstance(keep.merge, CarryingMerge) else keep.merge
        put("merge", merge)
        put("answering", merge if isinstance(merge, Answering) else None)
        put("hiding", hiding_of(keep))
        put("asks", Queries(read.asks) if isinstance(read, LearningFromQueries) else None)
        lower, codes = None if keep is None else keep.lower, self.codecs != (None, None)
        put("fitted", (codes or lower is not None) and any(True for _ in fitted_words((*self.codecs, lower))))
        put("learns", tuple(sorted(learns(self.codecs), key=key_of)) if codes else ())
        put("sees_below", codes and sees_below(self.codecs))
        carries = self.read_prompt is not None and self.read_prompt.carries
        put("alone", self.stack is not None or self.sees_below or self.picks or carries)
        self._put_records(put)

    def _put_records(self, put: Callable[[str, Any], None]) -> None:
        """Set what slots and rows carry, and what a decode step records for that."""
        keep, read = self.keep, self.read
        score = None if keep is None else keep.score
        put("traces_of_keep", frozenset() if score is None else frozenset(score.traces))
        traces = {*self.traces_of_keep, *(read.traces if isinstance(read, Remembering) else ())}
        traces |= {read.mark} if isinstance(read, Recycling | Prefetching) else set()
        traces |= {*read.marks} if isinstance(read, Tracing) else set()
        needs = {o for trace in traces for o in trace.needs}
        asked = [] if keep is None or not self.evicting else observations(keep, in_steps=True)
        masses = {o for o in needs if isinstance(o, Mass)} if score is not None else set()
        if score is not None and self.at_once:
            masses |= {o for o in asked if isinstance(o, Mass)}
            masses |= {Mass("sum")} if Queries(1) in score.in_steps.needs else set()
        # Inside a token's own step its query is available, so rows need not carry it.
        at_hand = Queries(1) if self.at_once else None
        put("traces", tuple(sorted(traces, key=key_of)))
        put("masses", tuple(sorted(masses, key=key_of)))
        compared = (o for o in needs if isinstance(o, SlotObservation))
        put("slot_observations", tuple(sorted(compared, key=key_of)))
        put("carried", tuple(o for o in asked if isinstance(o, Carried) and o != at_hand))

    def number(self, index: Any) -> Any:
        """Return the number of the group's layer `index`, an int or an array of them."""
        return self.first + self.stride * index

    @property
    def codecs_of_new(self) -> tuple[Any, Any]:
        """The codecs of the slots that new tokens enter; a tail after an encoded body is unencoded."""
        return (None, None) if self.split else self.codecs

    @property
    def rewrites(self) -> bool:
        """Whether decode steps change keys or values of stored tokens: by merges, or in a second tier."""
        keep = self.keep
        if keep is None or not self.evicting:
            return False
        return keep.lower is not None or bool({"k", "v"} & {*written(keep.merge)})

    @property
    def lasting(self) -> bool:
        """Whether decode steps only add slots and change none, so that copies of a row can share slots."""
        apart = self.split or self.sinks or self.stack is not None or self.host is not None
        unsteady = self.keep is not None and not self.keep.phase.steady
        return self.kind == "slots" and not (self.evicting or apart or unsteady or self.traces)

    def replaced(self, **fields: Any) -> GroupMethod:
        """Return a copy with other fields."""
        return dataclasses.replace(self, **fields)

    def of_layer(self, index: int | Array, row: Array | None = None) -> GroupMethod:
        """Return a group of one layer, with the fitted arrays of that layer; for all rows, or for one."""
        one = lambda x: jax.lax.dynamic_slice_in_dim(x, index, 1)  # noqa: E731
        codec_arrays = jax.tree.map(one, dict(self.codec_arrays))
        if row is not None:
            for name in map(key_of, self.learns):
                cut = lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1, 1)  # noqa: E731
                codec_arrays[name] = jax.tree.map(cut, codec_arrays[name])
        return self.replaced(codec_arrays=codec_arrays)


@dataclasses.dataclass(frozen=True)
class Alike:
    """A group without the indices of its layers: a static argument by which equal groups share a program."""

    same: tuple[Any, ...]
    gm: GroupMethod = dataclasses.field(compare=False)


def strides_of(gms: Sequence[GroupMethod]) -> tuple[int, ...]:
    """How far apart the layers of each group are; empty if they are neighbours in all."""
    return tuple(gm.stride for gm in gms) if any(gm.stride > 1 for gm in gms) else ()


def group_method(
    method: Method, layers: range, window: int | None, shared: int | None = None, kind: str = "slots"
) -> GroupMethod:
    """Return the part of a method that some layers, stacked as one group, follow.

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
    """Return the codecs of keys and values of some layers."""
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
