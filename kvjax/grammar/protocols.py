"""What the words of a sentence see, and what each kind of word promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.keys import key_of
from kvjax.ops.base.rope import Rope
from kvjax.state.codes import Codec, Codes

# What patterns take: they are computed on the host, too.
Numbers = Array | np.ndarray


class View(NamedTuple):
    """One layer's slots as a method sees them, decoded and in position order, the empty ones last.

    Where a token's own step evicts, slots are in any order, unless the score asks for it (`ordered`).
    traces: what the method remembers of them, by its key (see `of`). received: the attention that each slot
    got from the new queries, as the observed masses record it.
    """

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S V"]
    pos: Int[Array, "B K S"]
    bias: Float[Array, "B K S"] | None
    traces: dict[str, Float[Array, "B K S"]]
    received: dict[str, Float[Array, "B K S"]] = {}  # noqa: RUF012 (never written to)

    def of(self, trace: Trace) -> Float[Array, "B K S"]:
        """What is remembered; ValueError where the score's `traces` does not name it."""
        try:
            return self.traces[key_of(trace)]
        except KeyError:
            raise ValueError(f"{trace!r} is not remembered: name it in the score's `traces`") from None


class Inputs(NamedTuple):
    """What a layer computed for its new tokens; observations are functions of it.

    q and k are rotated, q_raw and k_raw are not; pos is -1 on padding; length counts each row's tokens so
    far, these included. fitted: the layer's arrays of words that were fitted (`kvjax.grammar.fitted`), by
    digest and name. tokens: their ids; None where vectors were given in their place. v: None where a layer
    makes no values of its own.
    """

    q: Float[Array, "B N T H"]
    q_raw: Float[Array, "B N T H"]
    k_raw: Float[Array, "B K T H"]
    hidden: Float[Array, "B T D"]
    pos: Int[Array, "B T"]
    length: Int[Array, "B"]
    fitted: dict[str, dict[str, Array]] = {}  # noqa: RUF012 (never written to)
    tokens: Int[Array, "B T"] | None = None
    k: Float[Array, "B K T H"] | None = None
    v: Float[Array, "B K T V"] | None = None


class Seen(NamedTuple):
    """What a score may look at besides the slots.

    observed: results of the observations it asked for, by their key (see `of`), and for a merge what rows
    carry for it. mass: where a token's own step evicts, the probability its query gave each slot
    [B, K, S], summed over a group's heads. length: tokens seen, n: slots to keep per head, both [B]. layer:
    index in the stack. query: the current query of such a step, rotated. weights: the layer's matrices by
    name, where the score asks for them (`Word.weights`). fitted: as in `Inputs`, where a merge is asked.
    protect: the keep's patterns, which say what stays whatever its score (`kvjax.grammar.calls.spared`).
    """

    observed: dict[str, Any]
    mass: Float[Array, "B K S"] | None
    length: Int[Array, "B"]
    n: Int[Array, "B"]
    layer: int | Array
    attention: AttentionSpec
    query: Float[Array, "B N 1 H"] | None = None
    weights: dict[str, Array] | None = None
    fitted: dict[str, dict[str, Array]] = {}  # noqa: RUF012 (never written to)
    protect: tuple[Any, ...] = ()

    def of(self, observation: Observation | CarryingMerge) -> Any:
        """What an observation recorded; ValueError where the score's `needs` does not name it."""
        try:
            return self.observed[key_of(observation)]
        except KeyError:
            raise ValueError(f"{observation!r} was not recorded: name it in the score's `needs`") from None


class AttentionSpec(NamedTuple):
    """The model's attention constants that scores need; rope is that of the layers that are scored."""

    scale: float
    softcap: float | None
    rope: Rope


@runtime_checkable
class Observation(Protocol):
    """A static word naming what must be recorded while a layer attends: Inputs -> arrays.

    `phases`, where a word has them, say whether it exists "prefill", "step" or both; else in prefills alone.
    """

    def __call__(self, inputs: Inputs) -> Any: ...


@runtime_checkable
class Carried(Observation, Protocol):
    """An observation of more than the newest token: in steps, every row carries what it has seen so far."""

    def start(self, inputs: Inputs) -> Any:
        """What a row carries before its first token: arrays [B, ...].

        Those of whole numbers are positions, -1 is none; all others are zeros (`kvjax.api.rows.reset_rows`).
        """
        ...

    def carry(self, carried: Any, inputs: Inputs) -> Any:
        """The same, behind new tokens; what a row without new tokens carries stays as it is."""
        ...

    def read(self, carried: Any) -> Any:
        """The observation, as a call on all the tokens would give it."""
        ...


@runtime_checkable
class Meeting(Observation, Protocol):
    """What slots receive from new queries, computed from both; a call on `Inputs`, without slots, raises.

    `by_layer`, where a word has it, says that `of` takes the layer's index in the stack as well.
    """

    def of(
        self, q: Float[Array, "B N T H"], q_pos: Int[Array, "B T"], k: Float[Array, "B K S H"],
        pos: Int[Array, "B #K S"],
    ) -> Float[Array, "B K S"]:  # fmt: skip
        """A number for every slot; q and k are rotated, positions are -1 on padding and in empty slots."""
        ...


# Of a slot that no query is hidden from.
NEVER = 2**30


@runtime_checkable
class Hiding(Observation, Protocol):
    """From which new tokens on slots are hidden, themselves included; a call on `Inputs` raises.

    It is known before a layer attends, of a prompt's tokens and in a step, where what it hides leaves first.
    traces: what it asks of slots, which the score must remember; it is the same in all lists of a layer.
    """

    @property
    def traces(self) -> tuple[Trace, ...]: ...

    def since(
        self, inputs: Inputs, traces: dict[str, Float[Array, "B K S"]], pos: Int[Array, "B #K S"]
    ) -> Int[Array, "B K S"]:
        """The position of the first new token that does not see a slot; `NEVER` where all do."""
        ...


@runtime_checkable
class Trace(Protocol):
    """What a method remembers of every slot: one number, which moves with it wherever it is stored.

    needs: the observed masses or `Meeting`s by which it grows. `behind_layers`, where a word has it, says
    that new tokens' numbers are their surprisals, which are known once all layers have run; `by_ids` says
    that they follow from token ids.
    """

    @property
    def needs(self) -> frozenset[Observation]: ...

    def start(self, inputs: Inputs, heads: int) -> Float[Array, "B K T"]:
        """The numbers of new tokens, before their own queries are counted."""
        ...

    def grow(self, old: Float[Array, "*lists S"], seen: Seen) -> Float[Array, "*lists S"]:
        """The numbers of slots after new queries, whose masses `seen` has; of new tokens' slots, too."""
        ...


@runtime_checkable
class Judging(Trace, Protocol):
    """A trace that also changes when slots are chosen among: what is said of a slot then is remembered."""

    def judge(self, view: View, seen: Seen) -> Float[Array, "B K S"]:
        """The numbers of a view's slots, before they are scored; the view is in position order."""
        ...


@runtime_checkable
class Score(Protocol):
    """How much each slot matters; higher stays. `needs` and `traces` are known before attention runs."""

    @property
    def needs(self) -> frozenset[Observation]: ...

    @property
    def traces(self) -> frozenset[Trace]: ...

    def __call__(self, view: View, seen: Seen) -> Float[Array, "B K S"]: ...


@runtime_checkable
class Merge(Protocol):
    """What becomes of evicted slots: the kept ones may take them up.

    `writes`, where a word has it, names what it changes of the kept slots: some of "k", "v", "bias" and
    "traces"; else the first three. Where it writes biases, every slot has one. `traces`, where a word has
    them, names what it asks of slots (`View.of`), which the score must remember. `one_by_one` says that it
    can act after a token whose threshold evicts one slot of each list. `ordered` says that it asks which
    slots are neighbours, so that it must see them in position order: no token's own step evicts with it.
    `at_prompts` is False for a word that merges only while decoding: slots evicted from a prompt are then
    dropped.
    """

    @property
    def needs(self) -> frozenset[Observation]: ...

    def __call__(
        self, view: View, kept: Bool[Array, "B K S"], leaving: Int[Array, "B K E"], seen: Seen
    ) -> View:
        """The view after the slots `leaving` have joined `kept` ones; an index of S stands for no slot."""
        ...


@runtime_checkable
class CarryingMerge(Merge, Protocol):
    """A merge of which every row carries something from eviction to eviction; a call finds it in `seen`."""

    def start(self, view: View) -> Any:
        """What rows carry before anything leaves: arrays [B, ...] of zeros; only the view's shapes count."""
        ...

    def carry(
        self,
        carried: Any,
        view: View,
        kept: Bool[Array, "B K S"],
        leaving: Int[Array, "B K E"],
        seen: Seen,
    ) -> Any:
        """The same with these slots; as it was in rows that none leaves. It is called before the merge."""
        ...


@runtime_checkable
class Answering(CarryingMerge, Protocol):
    """A merge that answers queries by what rows carry: one more part of the union that a query attends to."""

    def answer(
        self, carried: Any, q: Float[Array, "B N T H"], fitted: dict[str, dict[str, Array]]
    ) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:
        """(out, lse) of rotated queries over all that has left; lse is -inf where nothing has."""
        ...


@runtime_checkable
class Pattern(Protocol):
    """Slots that must stay whatever their score: a function of integers, which may be numpy's, too."""

    def __call__(
        self, pos: Int[Numbers, "B K S"], length: Int[Numbers, "B"], n: Int[Numbers, "B"]
    ) -> Bool[Numbers, "B K S"]: ...


@runtime_checkable
class Allocation(Protocol):
    """Turns a mean budget into one count per layer, row and head.

    uniform ones keep dense storage, the others pages; across_layers: slots move between layers, so all
    layers share one pool. A word may also have `threshold`: then slots stay or leave by their own score, in
    steps as at the end of a prefill, and how many stay follows from the data. `layer_rest(budget, tokens,
    layers, heads)`, where a word has it, says what `layer_slots` says of the slots that do not stay; else a
    second tier has places for all tokens. One that looks at more than scores is `Preferring`.
    """

    @property
    def uniform(self) -> bool: ...

    @property
    def across_layers(self) -> bool: ...

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]: ...

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        """Most slots that a row of at most `tokens` tokens keeps in all its heads, per layer (static)."""
        ...


@runtime_checkable
class Preferring(Allocation, Protocol):
    """An allocation that needs more than scores: what a layer saw says how much its heads should get."""

    @property
    def needs(self) -> frozenset[Observation]: ...

    def preference(self, view: View, seen: Seen) -> Float[Array, "B K"]:
        """How much a layer's heads should get, compared with those of other layers; nothing is negative."""
        ...

    def counts(
        self,
        scores: Float[Array, "L B K S"],
        n: Int[Array, "B"],
        preferences: Float[Array, "L B K"] | None = None,
    ) -> Int[Array, "L B K"]:
        """As in `Allocation`; preferences are those of all layers, and always given."""
        ...


@runtime_checkable
class Make(Protocol):
    """Another model made of a model before anything is read; the sentence then acts on that one's cache.

    A frozen dataclass like all words: a model remembers what was made of it by this word, and the
    fingerprint of what was made is that of the model and the word's `repr`.
    """

    def config(self, config: Any) -> Any:
        """The config of what is made of a model of this `Config`. Raises ValueError where nothing can be."""
        ...

    def params(self, params: dict[str, Any], config: Any) -> dict[str, Any]:
        """The parameters of what is made, of those of a model of this `Config`."""
        ...


@runtime_checkable
class Stacking(Protocol):
    """Which adjacent layers are stored as one after a prefill, and how: the stack word of a sentence.

    most: how many tokens of a list at most stay as computed in both layers (a `kvjax.grammar.Budget`).
    """

    @property
    def most(self) -> Any: ...

    def first(self, layers: int) -> int:
        """The lowest layer that may be merged, in a model of so many."""
        ...

    def codecs(self, codec: Codec | None) -> tuple[Codec, Codec]:
        """How the lower and the upper layer store what is merged, where `codec` encodes slots.

        One that `borrows` leaves arrays to the codes of the layer below (`kvjax.state.code_forms.completed`).
        """
        ...

    def apart(
        self,
        k: tuple[Float[Array, "*b S H"], Float[Array, "*b S H"]],
        v: tuple[Float[Array, "*b S V"], Float[Array, "*b S V"]],
        live: Bool[Array, "*b S"],
    ) -> Float[Array, "*b S"]:
        """How much a token should stay as computed, by its rows in two layers; -inf: not at all."""
        ...

    def merge(
        self, low: Float[Array, "*b S H"], high: Float[Array, "*b S H"], codec: Codec | None
    ) -> tuple[Codes, Codes]:
        """The same rows of two layers as codes of each, by `codecs`."""
        ...


@runtime_checkable
class Residence(Protocol):
    """What the device holds of slots whose keys and values lie in host memory."""

    def places(self, slots: int, page: int, visited: int) -> int:
        """How many pages of `slots` slots the device holds; a step visits `visited` of them (static)."""
        ...


def over_layers(f: Callable[..., Any], *args: Any) -> Any:
    """f applied to every layer of stacked arguments [Lg, ...]; results stacked again."""
    layers = jax.tree.leaves(args)[0].shape[0]
    if layers == 1:
        one = f(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], one)
    return jax.lax.map(lambda a: f(*a), args)
