"""Mixers: what carries tokens' information to later tokens in one layer, and how it meets its past.

A mixer is a frozen dataclass, static and hashable. It knows its parameters and its equation; it does not know
where its past is stored. That is known to the `Memory` it is handed: `attend` appends slots and attends to
them, `recur` fetches a recurrent state, steps it and puts it back. So one mixer serves training without a
cache, a prefill and a decode step.

Layers exchange things by name. A mixer declares in `takes` what it needs from which layer; every layer then
publishes exactly what others take from it (`kvjax.models.exchange`), and finds what it asked for in
`Layer.taken`. These names are published:

* "input": the hidden state that came into the layer;
* "slots": the layer's past and its new keys and values, as `LayerSlots`;
* "logits": its attention logits, as `AttentionLogits`;
* "picks": the slots that its read picked, for layers above it in the same step;
* "values": the values of its new tokens, in the shape that its mixer computes them in;
* "tokens" and "embedding": what the decoder was given and its table of embeddings, from layer None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from kvjax.ops.attention.union import Keys
from kvjax.ops.base.rope import Rope
from kvjax.state.axes import say_state_axes
from kvjax.state.cache import GroupState

# Attention logits over each set of keys, -inf where a key is not visible.
AttentionLogits = tuple[Float[Array, "B N T _"], ...]
# What a layer leaves beside its output: "collected" for the memory, and what it publishes, by its name.
Left = dict[str, Any]


class Take(NamedTuple):
    """What is taken from which layer; layer None is the decoder itself."""

    name: str
    layer: int | None


class LayerSlots(NamedTuple):
    """One layer's slots, for the layers that read them: its past and what it just projected.

    state: what its group holds, in which it stands alone. k, v: its new keys, rotated, and values (None: the
    first channels of the keys); both None in a step, where the state holds them already. above: the layer
    stands above the reader, which then sees no key of its own token.
    """

    state: GroupState
    k: Float[Array, "B K T F"] | None = None
    v: Float[Array, "B K T V"] | None = None
    above: bool = False


class Layer(NamedTuple):
    """Which layer is speaking: its group, its index inside it (traced when stacked) and its constants.

    pos: positions of the layer's queries. publishes: the names that other layers take from it. taken: what it
    takes itself, by the keys of its mixer's `takes`.
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

    @property
    def slots(self) -> SlotShape:
        """The slots that the layer attends to."""
        return self.mixer.slots_of(self.config)

    @property
    def scale(self) -> float:
        """What attention logits multiply by."""
        return self.slots.scale


class SlotShape(NamedTuple):
    """What one token costs in a layer that keeps slots.

    heads: lists of slots. key, value: channels per slot. shared: no values are stored, because they are the
    first `value` channels of the keys or, if `value` is 0, those of another layer. scale: what logits
    multiply by. factors: keys are computed from what is stored, so a query cannot be compared with it
    directly. expands: but scores can look at what `Mixer.met` computes. fixed: the slots are filled before
    any token is read, and tokens add nothing to them (a context). ids: the stored values are the digits of
    token ids, which no codec may round, and a token's key is made from its own slot and the one before it.
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

    k is None where the layer reads another one's slots, v where the values are the first channels of the keys
    or another layer's. expand: how to attend where keys and values are not stored as they are attended to.
    extra: keys and values outside the sequence, which every query sees. rescore: the layer's logits
    [B, N, T, S], computed from the logits that it takes from another layer, its own rotated queries and its
    stored keys.
    """

    q: Float[Array, "B N T H"]
    k: Float[Array, "B K T F"] | None
    v: Float[Array, "B K T V"] | None
    hidden: Float[Array, "B T D"]
    expand: Expand | None = None
    extra: Keys | None = None
    rescore: Callable[[Array, Array, Array], Array] | None = None


# A recurrent layer's state: arrays by name, or `StackedState` for the parts that `Mixer.in_place` names.
RecurrentState = dict[str, Any]
# (the layer's state or None, which tokens are real) -> (output, new state).
Step = Callable[[RecurrentState | None, Bool[Array, "B T"]], tuple[Array, RecurrentState]]


class Narrowing(NamedTuple):
    """A prompt gets narrower behind layer `after`: the layers above run for some of its tokens.

    choose: from what the layer's group collected, and where its tokens stand, to the indices of the tokens
    that go on, in their order, and which of these entries are any. The layer is the last of its group. below:
    from what a lower group collected, and these, to what is left of it. then: where it gets narrower again.
    """

    after: int
    choose: Callable[[Any, Int[Array, "B T"]], tuple[Int[Array, "B M"], Bool[Array, "B M"]]]
    below: Callable[[Any, Int[Array, "B M"]], Any] | None = None
    then: Narrowing | None = None


class Passed(NamedTuple):
    """What passed through a layer.

    read: what its mixer was given, mixed: what it added to the hidden state, fed: what its feed-forward was
    given; None where it has none. out: what left the layer.
    """

    mixer: Mixer
    mlp: FeedForward
    p: Params
    read: Float[Array, "B T D"] | None
    mixed: Float[Array, "B T D"] | None
    fed: Float[Array, "B T D"] | None
    out: Float[Array, "B T D"]


class Memory(NamedTuple):
    """How a layer meets its past. attend and recur return (output, the group's new state, what is left).

    pos: positions of the new tokens, -1 on padding. attend: (layer, projections, state) with output [B, N, T,
    V]. recur: (layer, step, state) with the output of the step. held: (layer, state) with the fixed slots of
    the layer or of the one that it reads; empty where nothing filled them. last: index of each row's last new
    token, where only its logits are wanted and no layer is observed; layers that keep nothing of their inputs
    are then run for that token alone. implementation: of recurrences, as in `kvjax.ops.base.dispatch.form`.
    narrow: where upper layers run for fewer tokens. remat: for a gradient, what lies inside a layer is
    computed anew instead of kept. on_mesh: by whose rules rows of hidden states are split between layers, and
    rows and heads of recurrences. segments: which of its row's texts a token is of, where no layer's state
    goes on from one to the next. passes: where layers read slots from above, how many passes without and then
    with a gradient stand for the fixed point; None: as many as reach it. look: what to collect of every
    layer. takes: what a memory has layers take from each other beside what their mixers do, by the first
    layer of a group. ahead: called with what enters a group of layers and the state of the next one, which
    starts to bring what that one will need.
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
    look: Callable[[Passed], Any] | None = None
    takes: Mapping[int, Mapping[str, Take]] = MappingProxyType({})
    ahead: Callable[[Array, GroupState], GroupState] | None = None


class Mixer(LayerPart):
    """What every mixer offers; one is a frozen dataclass of this that overrides what it needs.

    grows: the parts of its state that hold something of every token, [B, S, ...]: they get room as slots do,
    and the part "count" says how much of it is used. untaught: parameters that no gradient reaches, because
    they are learned in another way.

    state_axes: one logical axis, or None, for the axes of every part of `state`, the first ones at least; ()
    for a part that every device holds whole. A name has the same axes in all mixers.

    clip: (gamma, zeta) of a clipped softmax. in_place: the parts of its state that a step of one token takes
    and gives as `StackedState`, which a kernel writes where they lie. in_segments: whether texts of one
    row are kept apart, so that a state starts anew where `Memory.segments` change; unless it is said, a layer
    without a state does so, because attention hides other texts by their positions.
    """

    state_axes: ClassVar[dict[str, Axes]] = {}
    grows: frozenset[str] = frozenset()
    untaught: frozenset[str] = frozenset()

    clip: tuple[float, float] | None = None
    in_place: frozenset[str] = frozenset()
    in_segments: bool | None = None

    def __init_subclass__(cls, abstract: bool = False, **more: Any) -> None:
        """Raises InputError as `LayerPart` does, and for states whose axes contradict another mixer's."""
        for name, axes in cls.state_axes.items():
            if unknown := sorted({axis for axis in axes if axis} - {*AXES}):
                raise InputError(
                    f"{cls.__name__}.state_axes names {unknown[0]!r}, expected one of {', '.join(AXES)}"
                )
            say_state_axes(name, axes)
        super().__init_subclass__(abstract=abstract, **more)

    @property
    def takes(self) -> dict[str, Take]:
        """What the layer needs of others, by what it is to the layer.

        The keys "slots" (read in place of slots of its own), "slot values" (the values of those slots, beside
        keys of its own) and "logits" (attended with in place of its own) have a meaning to `Memory.attend`.
        """
        return {}

    def source_of(self, key: str) -> int | None:
        """The layer from which it takes `key`; None where it does not."""
        take = self.takes.get(key)
        return None if take is None else take.layer

    def offers(self, config: Config) -> frozenset[str]:
        """What the layer can publish beside its input."""
        if self.slots(config) is None:
            return frozenset()
        return frozenset({"logits"} if "slots" in self.takes else {"slots", "logits"})

    def check(self, config: Config) -> None:
        """Raises ValueError where it does not fit the model."""

    def check_takes(self, config: Config, layer: int) -> None:
        """Raises ValueError where another layer has nothing of what this one takes, or not in time."""
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
        """ValueError where a layer reads slots unlike those that it attends to, or fewer than it sees."""
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
        """Name and shape of every parameter; matrices multiply from the right."""
        raise NotImplementedError

    def slots(self, config: Config) -> SlotShape | None:
        """The slots that the layer attends to; None where it keeps a state of constant size instead."""
        return None

    def slots_of(self, config: Config) -> SlotShape:
        """`slots` of a mixer that is known to have some."""
        slots = self.slots(config)
        assert slots is not None, f"{type(self).__name__} keeps no slots"
        return slots

    def met(
        self, p: Params, config: Config, window: int | None, k: Array, v: Array, pos: Int[Array, "B X S"]
    ) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S V"]]:
        """Keys and values of one layer as its queries meet them, of stored ones [B, X, S, ...], K >= X.

        Asked only where `SlotShape.expands`.
        """
        raise NotImplementedError

    def rope(self, config: Config, layer: int) -> Rope:
        """How queries and stored keys turn with their positions."""
        return Rope(kind="none")

    def query_heads(self, config: Config) -> int:
        """Heads that ask, in a layer with slots."""
        return config.heads

    def state(self, config: Config) -> Shapes:
        """Name and shape of what a row carries where the layer keeps no slots; empty elsewhere.

        Those that grow are given as of no token, (0, ...).
        """
        return {}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        """(output, new state, what the layer leaves)."""
        raise NotImplementedError
