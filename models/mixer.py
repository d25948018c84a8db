"""Mixers: what carries tokens' information to later tokens in one layer, and how it meets its past.

A mixer is a frozen dataclass, static and hashable. It knows its parameters and its equation; it does not know
where its past lies. That is the business of the `Memory` it is handed: slots are appended to and attended by
`attend`, a recurrent state is fetched, stepped and put back by `recur`. So one mixer serves training without
a cache, a prefill and a decode step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

from kvjax.models.config import Config
from kvjax.models.expand import Expand
from kvjax.models.layers import Params, Shapes
from kvjax.ops.attention.union import Keys
from kvjax.ops.base.rope import Rope

# Attention logits over each set of keys, -inf where a key is not visible.
AttentionLogits = tuple[Float[Array, "B N T _"], ...]


class Given(NamedTuple):
    """What a layer that reads another one's slots is handed: that layer's past and what it just projected.

    state, index: the source's group of segments and its place in them; None without a cache. k, v: its new
    keys, rotated, and values (None: the first channels of the keys); None in a step, whose past holds them.
    above: the source stands above the reader, which then sees no key of its own token. scores: its attention
    logits over each set of keys, where other layers use them.
    """

    state: Any
    index: int
    k: Float[Array, "B K T F"] | None
    v: Float[Array, "B K T V"] | None
    above: bool
    scores: AttentionLogits | None = None


class Layer(NamedTuple):
    """Which layer is speaking: its group, its index inside it (traced when stacked) and its constants.

    lends: other layers read its slots. shows: other layers use its attention logits. given: what the layer
    that this one reads has. shown: the logits of the layer whose weights this one takes. first_values: values
    of the new tokens in layer 0, where some mixer asks for them. kv_hidden: the hidden state that keys and
    values come from, where the mixer names its layer, and input what the whole mixer takes, where it is not
    the layer's own. pos: positions of the layer's queries. tokens, embed: what the decoder was given, and its
    embeddings.
    """

    group: int
    index: int | Array  # pyright: ignore[reportIncompatibleMethodOverride]
    number: int | Array
    window: int | None
    rope: Rope
    mixer: Any
    config: Config
    lends: bool = False
    shows: bool = False
    given: Given | None = None
    shown: AttentionLogits | None = None
    first_values: Array | None = None
    kv_hidden: Array | None = None
    input: Array | None = None
    pos: Any = None
    tokens: Array | None = None
    embed: Array | None = None

    @property
    def scale(self) -> float:
        """What attention logits multiply by."""
        return self.mixer.slots(self.config).scale


class SlotShape(NamedTuple):
    """What one token costs in a layer that keeps slots.

    heads: lists of slots. key, value: channels per slot; shared: the values are the first `value` channels of
    the keys (or another layer's, if `value` is 0) and are not stored. scale: what logits multiply by.
    factors: what is stored are no keys that a query could meet, but what they are made from. fixed: the slots
    are filled before any token is read, and tokens add nothing to them (a context). ids: the values are
    digits of token ids, which no codec may round, and keys need the slots of earlier tokens too.
    """

    heads: int
    key: int
    value: int
    scale: float
    shared: bool = False
    factors: bool = False
    fixed: bool = False
    ids: bool = False


class Projected(NamedTuple):
    """What a layer asks with and stores for its new tokens, before rotation, and the input it came from.

    k is None where the layer reads another one's slots, v where the values are the first channels of the keys
    or another layer's. expand: the form that is attended to where it is not the stored one. extra: keys and
    values outside the sequence, which every query sees. rescore: logits [B, N, T, S] from those that the
    layer is shown, its own rotated queries and stored keys.
    """

    q: Float[Array, "B N T H"]
    k: Float[Array, "B K T F"] | None
    v: Float[Array, "B K T V"] | None
    hidden: Float[Array, "B T D"]
    expand: Expand | None = None
    extra: Keys | None = None
    rescore: Callable[[Array, Array, Array], Array] | None = None


RecurrentState = dict[str, Any]
# (the layer's state or None, which tokens are real) -> (output, new state); arrays or what `in_place` says.
Step = Callable[[RecurrentState | None, Bool[Array, "B T"]], tuple[Array, RecurrentState]]


class Memory(NamedTuple):
    """How a layer meets its past. attend and recur return (output, the group's new state, what to collect).

    pos: positions of the new tokens, -1 on padding. attend: (layer, projections, state) with output
    [B, N, T, V]. recur: (layer, step, state) with the output of the step. held: (layer, state) with the fixed
    slots of the layer or of the one that it reads, none where nothing filled them. last: index of each row's
    last new token, where only that one's logits are wanted and nothing is observed: layers that keep nothing
    of their inputs then see no other. implementation: of recurrences, as in `kvjax.ops.base.dispatch.form`.
    """

    pos: Int[Array, "B T"]
    attend: Callable[[Layer, Projected, Any], tuple[Array, Any, Any]]
    recur: Callable[[Layer, Step, Any], tuple[Array, Any, Any]]
    held: Callable[[Layer, Any], list[Keys]]
    last: Int[Array, "B"] | None = None
    implementation: str | None = None


class Mixer:
    """What every mixer offers; one is a frozen dataclass of this that overrides what it needs.

    source: the layer whose slots are read, where they are not the layer's own. value_source: the layer whose
    values are read beside the layer's own keys. kv_input: the layer whose input keys and values come from,
    one below or this one. weights_source: the layer whose attention weights are taken. value_mix: the layer
    asks for the values of layer 0. clip: (gamma, zeta) of a clipped softmax. in_place: the parts of its state
    that a step of one token takes and gives as `StackedState`, which a kernel writes where they lie.
    """

    source: int | None = None
    value_source: int | None = None
    kv_input: int | None = None
    weights_source: int | None = None
    value_mix: float | None = None
    clip: tuple[float, float] | None = None
    in_place: frozenset[str] = frozenset()

    def check(self, config: Config) -> None:
        """Raises ValueError where it does not fit the model."""

    def shapes(self, config: Config) -> Shapes:
        """Name and shape of every parameter; matrices multiply from the right."""
        raise NotImplementedError

    def slots(self, config: Config) -> SlotShape | None:
        """The slots that the layer attends to; None where it keeps a state of constant size instead."""
        return None

    def rope(self, config: Config, layer: int) -> Rope:
        """How queries and stored keys turn with their positions."""
        return Rope(kind="none")

    def query_heads(self, config: Config) -> int:
        """Heads that ask, in a layer with slots."""
        return config.heads

    def state(self, config: Config) -> Shapes:
        """Name and shape of what a row carries where the layer keeps no slots; empty elsewhere."""
        return {}

    def first_values(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: Any
    ) -> Array | None:
        """What later layers with a `value_mix` add to their values, where this is layer 0."""
        raise ValueError(f"{type(self).__name__} in layer 0 has no values that other layers could add")

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: Any
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """(output, new state, collected)."""
        raise NotImplementedError
