"""Mixers: what carries tokens' information to later tokens in one layer, and how it meets its past.

A mixer is a frozen dataclass, static and hashable. It knows its parameters and its equation; it does not know
where its past lies. That is the business of the `Memory` it is handed: slots are appended to and attended by
`attend`, a recurrent state is fetched, stepped and put back by `recur`. So one mixer serves training without
a cache, a prefill and a decode step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes
from kvjax.ops.attention import Keys
from kvjax.ops.rope import Rope


class Given(NamedTuple):
    """What a layer that reads another one's slots is handed: that layer's past and what it just projected.

    state, index: the source's group of segments and its place in them; None without a cache. k, v: its new
    keys, rotated, and values (None: the first channels of the keys); None in a step, whose past holds them.
    above: the source stands above the reader, which then sees no key of its own token.
    """

    state: Any
    index: int
    k: Float[Array, "B K T F"] | None
    v: Float[Array, "B K T V"] | None
    above: bool


class Layer(NamedTuple):
    """Which layer is speaking: its group, its index inside it (traced when stacked) and its constants.

    lends: other layers read its slots. given: what the layer that this one reads has. first_values: values
    of the new tokens in layer 0, where some mixer asks for them. kv_hidden: the hidden state that keys and
    values come from, where the mixer names its layer. pos: positions of the layer's queries.
    """

    group: int
    index: int | Array  # pyright: ignore[reportIncompatibleMethodOverride]
    number: int | Array
    window: int | None
    rope: Rope
    mixer: Any
    config: Config
    lends: bool = False
    given: Given | None = None
    first_values: Array | None = None
    kv_hidden: Array | None = None
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
    factors: what is stored are no keys that a query could meet, but what they are made from. ids: the values
    are digits of token ids, which no codec may round, and keys need the slots of earlier tokens too.
    """

    heads: int
    key: int
    value: int
    scale: float
    shared: bool = False
    factors: bool = False
    ids: bool = False


class Expand(NamedTuple):
    """Another form of the same attention: queries from rotated ones, keys and values from stored ones.

    outputs: what the stored form's output is in this one, for a single query, which reads what is stored;
    None where the stored form cannot be attended to. rows: where given, `keys` takes rows(stored keys, stored
    values) of a token beside those of the token before it.
    """

    queries: Callable[[Array], Array]
    keys: Callable[[Array, Array], tuple[Array, Array]]
    outputs: Callable[[Array], Array] | None
    rows: Callable[[Array, Array], tuple[Array, Array]] | None = None

    def sets(self, stored: Sequence[Keys]) -> list[Keys]:
        """The keys and values behind all sets of stored ones."""
        if self.rows is not None:
            stored = with_previous([s._replace(**_named(self.rows(s.k, s.v))) for s in stored])
        return [s._replace(**_named(self.keys(s.k, s.v))) for s in stored]


def _named(pair: tuple[Array, Array]) -> dict[str, Array]:
    return dict(zip("kv", pair, strict=True))


def with_previous(sets: Sequence[Keys]) -> list[Keys]:
    """Every slot's k and v beside those of the token before it, whichever set holds them; zeros if none.

    No token may be missing: a position is then less than the number of all slots.
    """
    k, v = (jnp.concatenate([getattr(s, n) for s in sets], 2) for n in "kv")
    pos = jnp.concatenate([s.pos for s in sets if s.pos is not None], -1)
    slot = jax.lax.broadcasted_iota(jnp.int32, pos.shape, 2)

    def place(pos: Array, slot: Array) -> Array:
        return jnp.zeros_like(slot).at[jnp.where(pos >= 0, pos, pos.size)].set(slot, mode="drop")

    slot_of = jax.vmap(jax.vmap(place))(pos, slot)
    before = jnp.take_along_axis(slot_of, jnp.maximum(pos - 1, 0), axis=-1)[..., None]

    def beside(x: Array) -> Array:
        previous = jnp.take_along_axis(x, before, axis=2)
        return jnp.concatenate([x, jnp.where((pos > 0)[..., None], previous, jnp.zeros((), x.dtype))], -1)

    ends = np.cumsum([s.k.shape[2] for s in sets])[:-1]
    both = zip(jnp.split(beside(k), ends, 2), jnp.split(beside(v), ends, 2), strict=True)
    return [s._replace(**_named(pair)) for s, pair in zip(sets, both, strict=True)]


class Projected(NamedTuple):
    """What a layer asks with and stores for its new tokens, before rotation, and the input it came from.

    k is None where the layer reads another one's slots, v where the values are the first channels of the keys
    or another layer's. expand: the form that is attended to where it is not the stored one. extra: keys and
    values outside the sequence, which every query sees.
    """

    q: Float[Array, "B N T H"]
    k: Float[Array, "B K T F"] | None
    v: Float[Array, "B K T V"] | None
    hidden: Float[Array, "B T D"]
    expand: Expand | None = None
    extra: Keys | None = None


State = dict[str, Array]
# (the layer's state or None, which tokens are real) -> (output, new state)
Step = Callable[[State | None, Bool[Array, "B T"]], tuple[Array, State]]


class Memory(NamedTuple):
    """How a layer meets its past; both return (output, new state of the layer's group, what to collect).

    pos: positions of the new tokens, -1 on padding. attend: (layer, projections, state) with output
    [B, N, T, V]. recur: (layer, step, state) with the output of the step. last: index of each row's last new
    token, where only that one's logits are wanted and nothing is observed: layers that keep nothing of their
    inputs then see no other.
    """

    pos: Int[Array, "B T"]
    attend: Callable[[Layer, Projected, Any], tuple[Array, Any, Any]]
    recur: Callable[[Layer, Step, Any], tuple[Array, Any, Any]]
    last: Int[Array, "B"] | None = None


class Mixer(Protocol):
    """What every mixer offers."""

    source: int | None
    """The layer whose slots are read, where they are not the layer's own."""
    value_source: int | None
    """The layer whose values are read beside the layer's own keys; else None."""
    kv_input: int | None
    """The layer whose input keys and values come from, if named: one below, or this one; else None."""

    def check(self, config: Config) -> None:
        """Raises ValueError where it does not fit the model."""
        ...

    def shapes(self, config: Config) -> Shapes:
        """Name and shape of every parameter; matrices multiply from the right."""
        ...

    def slots(self, config: Config) -> SlotShape | None:
        """The slots that the layer attends to; None where it keeps a state of constant size instead."""
        ...

    def rope(self, config: Config, layer: int) -> Rope:
        """How queries and stored keys turn with their positions."""
        ...

    def state(self, config: Config) -> Shapes:
        """Name and shape of what a row carries where the layer keeps no slots; empty elsewhere."""
        ...

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: Any
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """(output, new state, collected)."""
        ...
