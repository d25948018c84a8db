"""Mixers: the part of a layer that carries information from tokens to later tokens, and its memory.

A mixer is a frozen dataclass, static and hashable. It knows its parameters and its equation; it does not know
where its past is stored. The `Memory` passed to it does: `attend` appends slots and attends to them, `recur`
fetches a recurrent state, steps it and stores it. So one mixer serves training without a cache, a prefill and
a decode step.

Layers exchange things by name. A mixer declares in `takes` what it needs from which layer; every layer then
publishes exactly what others take from it (`kvjax.models.exchange`), and gets what it takes in `Layer.taken`.
These names are published:

* "input": the layer's input, a hidden state;
* "mixer input": what its mixer gets of that, after the norm;
* "slots": the layer's past and its new keys and values, as `LayerSlots`;
* "logits": its attention logits, as `AttentionLogits`;
* "picks": the slots that its read picked, for layers above it in the same step;
* "picked": the tokens that its queries picked, of all that they see;
* "values": the values of its new tokens, in the shape in which its mixer computes them;
* "tokens" and "embedding": the decoder's input and its embedding table, from layer None.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from jaxtyping import Array, Bool, Float, Int

from kvjax.base.errors import InputError
from kvjax.mesh.on_mesh import Axes, OnMesh
from kvjax.mesh.rules import AXES
from kvjax.models.config import Config
from kvjax.models.expand import Expand
from kvjax.models.feed_forward import FeedForward
from kvjax.models.layer_part import LayerPart
from kvjax.models.layers import Params, Shapes
from kvjax.models.picking import Picking
from kvjax.ops.attention.union import Keys
from kvjax.ops.base.rope import Rope
from kvjax.state.axes import say_state_axes
from kvjax.state.cache import GroupState

# Attention logits over each set of keys, -inf for invisible keys.
AttentionLogits = tuple[Float[Array, "B N T _"], ...]
# What a layer returns beside its output: "collected" for the memory, and what it publishes, by name.
Left = dict[str, Any]


class Take(NamedTuple):
    """A published name and the layer that publishes it; layer None is the decoder itself."""

    name: str
    layer: int | None


class LayerSlots(NamedTuple):
    """One layer's slots, for the layers that read them: its past and what it just projected.

    state: the state of its group, in which it is the only layer. k, v: its new keys, rotated, and values
    (None: the first channels of the keys); both None in a step, where the state holds them already. above:
    whether the layer is above the reader, which then does not see the key of its own token.
    """

    state: GroupState
    k: Float[Array, "B K T F"] | None = None
    v: Float[Array, "B K T V"] | None = None
    above: bool = False


class Layer(NamedTuple):
    """A layer: its group, its index inside it (traced when stacked) and its constants.

    pos: positions of the layer's queries. publishes: the names that other layers take from it. taken: what it
    takes itself, by the keys of its mixer's `takes`. embedded: its own embeddings of the tokens, where the
    model has some for every layer.
    """

    group: int
    index: int | Array  # pyright: ignore[reportIncompatibleMethodOverride]
    number: int | Array
    window: int | None
    rope: Rope
    mixer: Mixer
    config: Config
    pos: Int[Array, "B T"]
    publishes: frozenset[str] = frozenset()
    taken: Mapping[str, Any] = MappingProxyType({})
    embedded: Float[Array, "B T P"] | None = None

    @property
    def slots(self) -> SlotShape:
        """The slots that the layer attends to."""
        return self.mixer.slots_of(self.config)

    @property
    def scale(self) -> float:
        """The factor on attention logits."""
        return self.slots.scale


class SlotShape(NamedTuple):
    """The shape of one token's slot in a layer that keeps slots.

    heads: stored KV heads. key, value: channels per slot. shared: whether no values are stored, because they
    are the first `value` channels of the keys or, if `value` is 0, those of another layer. scale: the factor
    on logits. factors: whether keys are computed from what is stored, so that queries cannot be compared with
    it directly. expands: if so, whether scores can use what `Mixer.met` computes. fixed: whether the slots
    are filled before any token is read, and tokens add nothing to them (a context). ids: whether the stored
    values are the digits of token ids, which no codec may round, and a token's key is computed from its own
    slot and the one before it.
    """

    heads: int
    key: int
    value: int
    scale: float
    shared: bool = False
    factors: bool = False
    fixed: bool = False
    ids: bool = False
    expands: bool = False


class Projected(NamedTuple):
    """A layer's queries, keys and values of its new tokens, before rotation, and the input they came from.

    k is None if the layer reads another layer's slots, v if the values are the first channels of the keys or
    another layer's. expand: how to attend if keys and values are not stored as they are attended to. extra:
    keys and values outside the sequence, which every query sees. rescore: the layer's logits [B, N, T, S],
    computed from the logits that it takes from another layer, its own rotated queries and its stored keys.
    picking: how queries pick the tokens that they attend to, if not all.
    """

    q: Float[Array, "B N T H"]
    k: Float[Array, "B K T F"] | None
    v: Float[Array, "B K T V"] | None
    hidden: Float[Array, "B T D"]
    expand: Expand | None = None
    extra: Keys | None = None
    rescore: Callable[[Array, Array, Array], Array] | None = None
    picking: Picking | None = None


# A recurrent layer's state: arrays by name, or `StackedState` for the parts in `Mixer.in_place`.
RecurrentState = dict[str, Any]
# (the layer's state or None, which tokens are real) -> (output, new state).
Step = Callable[[RecurrentState | None, Bool[Array, "B T"]], tuple[Array, RecurrentState]]


class Narrowing(NamedTuple):
    """A prompt is narrowed after layer `after`: the layers above run for only some of its tokens.

    choose: from what the layer's group collected, and the positions of its tokens, to the indices of the
    tokens that go on, in order, and which of these entries are in use. The layer is the last of its group.
    below: from what a lower group collected, and these indices, to the part that is kept. then: the next
    narrowing.
    """

    after: int
    choose: Callable[[Any, Int[Array, "B T"]], tuple[Int[Array, "B M"], Bool[Array, "B M"]]]
    below: Callable[[Any, Int[Array, "B M"]], Any] | None = None
    then: Narrowing | None = None


class LayerValues(NamedTuple):
    """The intermediate results of a layer.

    read: its mixer's input, mixed: what the mixer added to the hidden state, fed: its feed-forward's input;
    None without one. out: the layer's output.
    """

    mixer: Mixer
    mlp: FeedForward
    p: Params
    read: Float[Array, "B T D"] | None
    mixed: Float[Array, "B T D"] | None
    fed: Float[Array, "B T D"] | None
    out: Float[Array, "B T D"]


class Memory(NamedTuple):
    """How a layer uses its past. attend and recur return (output, the group's new state, what it leaves).

    pos: positions of the new tokens, -1 on padding. attend: (layer, projections, state) with output [B, N, T,
    V]. recur: (layer, step, state) with the output of the step. held: (layer, state) -> the fixed slots of
    the layer or of the one that it reads; empty if nothing filled them. last: index of each row's last new
    token, if only its logits are needed and no layer is observed; layers that keep nothing of their inputs
    are then run for that token alone. implementation: of recurrences, as in `kvjax.ops.base.dispatch.form`.
    narrow: from where on upper layers run for fewer tokens. remat: whether the gradient recomputes the inside
    of a layer instead of storing it. on_mesh: the mesh whose rules split rows of hidden states between
    layers, and rows and heads of recurrences. segments: the index of each token's text in its row, if rows
    pack several texts and no state continues from one to the next. passes: if layers read slots from above,
    how many passes without and then with a gradient approximate the fixed point; None: as many as reach it.
    look: what to collect from every layer. takes: what layers take from each other for the memory, beside
    their mixers' takes, by the first layer of a group. ahead: called with a group's input and the state of
    the next group, to start copying what that one will need. alike: per group a value that is equal for
    groups in which attend and recur do the same, None for one like no other; None if that is not known.
    of_layers: arrays of single layers that attend and recur may read, beside `params` and the states.
    """

    pos: Int[Array, "B T"]
    attend: Callable[[Layer, Projected, GroupState], tuple[Array, GroupState, Left]]
    recur: Callable[[Layer, Step, GroupState], tuple[Array, GroupState, Left]]
    held: Callable[[Layer, GroupState], list[Keys]]
    last: Int[Array, "B"] | None = None
    implementation: str | None = None
    narrow: Narrowing | None = None
    remat: bool = False
    on_mesh: OnMesh | None = None
    segments: Int[Array, "B T"] | None = None
    passes: tuple[int, int] | None = None
    look: Callable[[LayerValues], Any] | None = None
    takes: Mapping[int, Mapping[str, Take]] = MappingProxyType({})
    ahead: Callable[[Array, GroupState], GroupState] | None = None
    alike: Sequence[Hashable] | None = None
    of_layers: Any = ()


class Mixer(LayerPart):
    """The interface of mixers, which are frozen dataclasses that override what they need.

    grows: the parts of its state with an entry per token, [B, S, ...]: they get free entries like slots, and
    the part "count" says how much is used. without_gradient: parameters without a gradient,
    because they are learned in another way.

    state_axes: one logical axis, or None, for the axes of every part of `state`, the first ones at least; ()
    for a part that every device holds whole. A name has the same axes in all mixers.

    clip: (gamma, zeta) of a clipped softmax. chunked: a query sees only its own chunk, from the last multiple
    of the window on. in_place: the parts of its state that a step of one token takes and returns as
    `StackedState`, which a kernel updates in place. in_segments: whether texts packed in one row are
    separated, so that a state starts anew where `Memory.segments` change; by default true for a layer without
    a state, because attention hides other texts by their positions. picks: whether queries
    pick the tokens that they attend to.
    """

    state_axes: ClassVar[dict[str, Axes]] = {}
    grows: frozenset[str] = frozenset()
    without_gradient: frozenset[str] = frozenset()

    clip: tuple[float, float] | None = None
    chunked: bool = False
    in_place: frozenset[str] = frozenset()
    in_segments: bool | None = None
    picks: bool = False

    def __init_subclass__(cls, abstract: bool = False, **more: Any) -> None:
        """Raise InputError as `LayerPart` does, and for states whose axes contradict another mixer's."""
        for name, axes in cls.state_axes.items():
            if unknown := sorted({axis for axis in axes if axis} - {*AXES}):
                raise InputError(
                    f"{cls.__name__}.state_axes names {unknown[0]!r}, expected one of {', '.join(AXES)}"
                )
            say_state_axes(name, axes)
        super().__init_subclass__(abstract=abstract, **more)

    @property
    def takes(self) -> dict[str, Take]:
        """What the layer takes from other layers: {role in this layer: Take(published name, source layer)}.

        The keys "slots" (read in place of slots of its own), "slot values" (the values of those slots, beside
        keys of its own) and "logits" (attended with in place of its own) are known to `Memory.attend`.
        """
        return {}

    def source_of(self, key: str) -> int | None:
        """Return the layer from which it takes `key`; None if it does not."""
        take = self.takes.get(key)
        return None if take is None else take.layer

    def offers(self, config: Config) -> frozenset[str]:
        """Return what the layer can publish beside its input."""
        if self.slots(config) is None:
            return frozenset()
        return frozenset({"logits"} if "slots" in self.takes else {"slots", "logits"})

    def check(self, config: Config) -> None:
        """Raise ValueError if it does not fit the model."""

    def check_takes(self, config: Config, layer: int) -> None:
        """Raise ValueError if another layer does not have what this one takes, or not in time."""
        for name, at in self.takes.values():
            if at is None:
                continue
            if not 0 <= at < config.layers:
                raise ValueError(f"layer {layer} reads layer {at}: there are 0 to {config.layers - 1}")
            offered = config.mixers[at].offers(config) | {"input"}
            if name == "slots" and (at == layer or name not in offered):
                raise ValueError(f"layer {layer} reads layer {at}, which has no slots of its own to read")
            # A layer has its own values at hand.
            if at != layer and name not in offered:
                raise ValueError(f"layer {layer} takes the {name} of layer {at}, which offers none")
        below = self.source_of("kv input")
        if below is not None and below > layer:
            raise ValueError(
                f"layer {layer} projects from the input of layer {below}, expected none above it"
            )
        weights = self.source_of("logits")
        if weights is not None and (weights >= layer or config.window(weights) != config.window(layer)):
            raise ValueError(
                f"layer {layer} takes the attention weights of layer {weights}, expected one below it with "
                f"the same window: theirs are {config.window(weights)} and {config.window(layer)}"
            )
        self._check_slots(config, layer)

    def _check_slots(self, config: Config, layer: int) -> None:
        """Raise ValueError if a layer reads slots that differ from its own, or that see fewer tokens."""
        values, source = self.source_of("slot values"), self.source_of("slots")
        if values is not None and values > layer:
            raise ValueError(f"layer {layer} reads the values of layer {values} above it")
        if source is None:
            return
        mine, theirs = self.slots_of(config), config.mixers[source].slots_of(config)
        if mine._replace(scale=theirs.scale) != theirs:
            raise ValueError(f"layer {layer} reads layer {source}, whose slots differ: {theirs}, not {mine}")
        seen, kept = config.window(layer), config.window(source)
        if kept is not None and (seen is None or seen > kept):
            raise ValueError(
                f"layer {layer} reads layer {source}, which keeps {kept} tokens: it would miss "
                f"some of its window of {'all' if seen is None else seen}"
            )

    def shapes(self, config: Config) -> Shapes:
        """Return the name and shape of every parameter; matrices multiply from the right."""
        raise NotImplementedError

    def slots(self, config: Config) -> SlotShape | None:
        """Return the slots that the layer attends to; None if it keeps a state of constant size instead."""
        return None

    def slots_of(self, config: Config) -> SlotShape:
        """`slots` of a mixer that is known to have some."""
        slots = self.slots(config)
        assert slots is not None, f"{type(self).__name__} keeps no slots"
        return slots

    def met(
        self, p: Params, config: Config, window: int | None, k: Array, v: Array, pos: Int[Array, "B X S"]
    ) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S V"]]:
        """Keys and values as the layer's queries attend to them, from stored ones [B, X, S, ...], K >= X.

        Called only if `SlotShape.expands`.
        """
        raise NotImplementedError

    def met_heads(self, config: Config) -> int:
        """Return K of `met`, the KV heads that the layer's queries attend to."""
        return config.kv_heads

    def rope(self, config: Config, layer: int) -> Rope:
        """How queries and stored keys are rotated by their positions."""
        return Rope(kind="none")

    def query_heads(self, config: Config) -> int:
        """Count the query heads, in a layer with slots."""
        return config.heads

    def state(self, config: Config) -> Shapes:
        """Return the name and shape of a row's state if the layer keeps no slots; empty otherwise.

        Parts that grow are given for zero tokens, (0, ...).
        """
        return {}

    def stored_form(self, config: Config) -> str:
        """Name how slots are stored, if an earlier release stored them otherwise; empty if none did.

        Fingerprints of models include it, so a cache that such a release saved is refused.
        """
        return ""

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        """Return (output, new state, what the layer leaves for others)."""
        raise NotImplementedError
