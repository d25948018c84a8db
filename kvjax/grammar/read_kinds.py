"""Kinds of reads: the base classes of the words that say which slots a query attends to."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

from jax import Array
from jaxtyping import Bool, Float, Int

from kvjax.base.errors import InputError
from kvjax.grammar.facts import Fact, Reasons, Stating
from kvjax.grammar.fitted import FittedWord, ModelSizes, check_sizes
from kvjax.grammar.kinds import AttentionSpec, Trace
from kvjax.state.cache import Slots
from kvjax.state.codes import Codec

# What reads require that cannot do with keys that are computed from what is stored, such as latents.
_OF_KEYS = {Fact.STORED_KEYS: "compares queries with stored keys"}


class Read(Stating):
    """The base class of reads, which select the slots of an encoded body that a query attends to.

    The newest tokens (tail) are always read. A slot that is not read receives no attention: a keep that
    evicts by what slots receive sees 0 there. `granule`: how many slots are summarised together.
    `skip_layers`: how many of the first layers read everything. `newest`: how many tokens always stay in the
    tail; at least those that fill no page do. `by_list`: `select` uses only a KV head's own slots and queries
    (all heads of a row hold equally many slots), so every device of a mesh selects for its own heads.
    `by_head`: whether every KV head picks for itself; False for a read that picks for all of a layer.

    A read that estimates attention to the other slots is `EstimatingRest`, one that weights the slots it
    reads is `Sampling`, one whose summaries depend on the prompt's keys is `Learning`, one that selects in
    some layers for others is `Reusing`, one that selects in some steps for others is `Recycling`, one that
    selects for the next step is `Prefetching`, one that selects for predicted queries is `Foreseeing`, one
    whose summaries are of values, too, is `Copying`, one whose summaries are made with arrays fitted to the
    model is `FittedBlocks`, and one that places what it picks anew is `Placing`.

    >>> from kvjax.words import Budget, PageBounds
    >>> isinstance(PageBounds(Budget(0.25)), Read)
    True
    """

    granule: int
    skip_layers: int
    newest: int = 0
    by_list: bool = False
    by_head: bool = True

    @property
    def requires(self) -> Reasons:
        return {
            Fact.ONE_TIER: "picks among the slots of one body",
            Fact.KEYS_BY_POSITION: "ranks keys at their positions",
        }

    @property
    def breaks(self) -> Reasons:
        found = {Fact.ALL_ATTENDED: "leaves slots out of a step's attention"}
        if self.looks_at(1):
            found[Fact.SUMMARIES] = "looks at all keys"
        return found

    def looks_at(self, width: int) -> int:
        """How many of `width` channels of every key `select` reads, which count as bytes read in a step."""
        return 0

    @abstractmethod
    def summarise(self, k: Float[Array, "*b S H"]) -> dict[str, Array]:
        """Per page of slots, what `select` ranks pages by: arrays [*b, S / granule, ...]."""
        raise NotImplementedError

    @abstractmethod
    def pages_visited(self, slots: int) -> int:
        """Return the largest number of pages of a body of `slots` that one query visits (static)."""
        raise NotImplementedError

    @abstractmethod
    def select(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"],
        implementation: str | None = None,
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:  # fmt: skip
        """Return the pages of a layer of `body` that these queries attend to, and how many of them count.

        M = pages_visited of the body's slots.
        """
        raise NotImplementedError


class Reusing(Read):
    """A read that selects in some layers, which read all of their slots; layers above reuse the result."""

    @abstractmethod
    def starts(self, layers: int) -> tuple[int, ...]:
        """Return the layers that select anew, in a model of `layers` layers (or the next layer that can)."""
        raise NotImplementedError


class Recycling(Read):
    """A read that selects in some steps, which read all slots; steps between read what was selected.

    A row selects when `stride` tokens have come since its last selection. Until then its queries read the
    slots selected then, those that were in the tail, and all newer ones.
    """

    # Every how many tokens a row selects anew.
    stride: int

    # 1 + the position of the token that selected a slot last; 0 if none did.
    mark: Trace


class Prefetching(Read):
    """A read that selects in every step the slots of the next one, which are thus known before it begins.

    A token reads what the token right before it selected. The first one after a prompt, and one that is
    asked again, read what they select themselves.
    """

    # 1 + the position of the token that selected a slot last; 0 if none did.
    mark: Trace

    # 1: what is selected is for the next step.
    steps_ahead: int


class Copying(Read):
    """A read whose summaries are of values, too, such as copies in few bits."""

    # The codec of the copies, which encodes tokens one by one.
    copies: Codec

    @property
    def requires(self) -> Reasons:
        return {**super().requires, **_OF_KEYS}

    @abstractmethod
    def summarise(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, k: Float[Array, "*b S H"], v: Float[Array, "*b S V"]
    ) -> dict[str, Array]:
        """As in `Read`, of keys and values."""
        raise NotImplementedError


class FittedBlocks(Read, FittedWord):
    """A read of blocks of keys whose summaries may be made with arrays that were fitted to the model.

    `kvjax fit` fits them so that `shares` is the attention that the blocks get.
    """

    # Arrays are fitted to the attention to other tokens than the first ones, which are always read.
    sinks: int = 0
    fit_first = False

    @abstractmethod
    def sizes(self, model: ModelSizes) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the names of every fitted array's axes, and their sizes; arrays of zeros are no fit."""
        raise NotImplementedError

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the arrays were fitted for another read, or to a model of other sizes."""
        assert self.fitted is not None
        if self.fitted.word != type(self).__name__:
            raise InputError(
                f"it was given arrays that were fitted for {self.fitted.word}, expected those for "
                f"{type(self).__name__}: run `kvjax fit {self.by}`"
            )
        for name, (axes, sizes) in self.sizes(model).items():
            check_sizes(self, f"array {name}", axes, name, sizes)

    @abstractmethod
    def summarise(
        self, k: Float[Array, "*b S H"], fitted: dict[str, Array] | None = None
    ) -> dict[str, Array]:
        """As in `Read`; fitted: the arrays [l, ...] of the l layers on the first axis of the keys."""
        raise NotImplementedError

    @abstractmethod
    def shares(
        self, q: Float[Array, "*b K G T H"], summary: dict[str, Array], live: Bool[Array, "*b #K #T P"],
        scale: float,
    ) -> Float[Array, "*b K T P"]:  # fmt: skip
        """Return the log of the share of a group's attention that each live block is said to get.

        summary: arrays [*b, K, P, ...]. scale: of the logits.
        """
        raise NotImplementedError


class Foreseeing(Read):
    """A read whose `select` gets predicted queries: this layer's, of what entered a layer below.

    What a layer reads is then known before the layers between have run, so that it can be brought from host
    memory meanwhile. The first `ahead` layers have no such layer, and read everything (`skip_layers`).
    """

    # How many layers below that layer is.
    ahead: int

    @property
    def requires(self) -> Reasons:
        return {**super().requires, **_OF_KEYS}


class Placing(Read):
    """A read that compares queries and keys at one distance, and says by what the slots it picks are rotated.

    `select` gets unrotated keys, which are therefore stored so, and queries rotated by the distance `apart`:
    unrotated, if that is 0. So does `learn`, if the read is `LearningFromQueries`.
    """

    # At which distance queries and keys are compared.
    apart: int

    @property
    def requires(self) -> Reasons:
        return {**super().requires, **_OF_KEYS}

    @abstractmethod
    def places(
        self, pos: Int[Array, "B K P"], end: Int[Array, "B K 1"], at: Int[Array, "B 1 1"]
    ) -> Int[Array, "B K P"]:
        """Return what rotates picked slots at these positions (-1 is no slot).

        The tail begins at position `end`, and the query is at position `at`.
        """
        raise NotImplementedError


class Remembering(Read):
    """A read whose summaries depend on traces that slots carry until they enter the body."""

    traces: frozenset[Trace]

    @property
    def requires(self) -> Reasons:
        return {**super().requires, **_OF_KEYS}

    @abstractmethod
    def summarise(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, k: Float[Array, "*b S H"], traces: dict[str, Float[Array, "*b S"]]
    ) -> dict[str, Array]:
        """As in `Read`; traces by their key."""
        raise NotImplementedError


class Counted(NamedTuple):
    """Slots of a body that are summed.

    Args:
        k: keys, rotated for queries.
        v: values; zeros where a slot does not count.
        pos: positions; -1 where a slot does not count.
        summary: what `summarise` says of them.

    >>> Counted._fields
    ('k', 'v', 'pos', 'summary')
    """

    k: Float[Array, "*b S H"]
    v: Float[Array, "*b S V"]
    pos: Int[Array, "*b S"]
    summary: dict[str, Array]


class EstimatingRest(Read):
    """A read that also estimates attention to the slots it leaves out: one more part of the union."""

    @abstractmethod
    def total(self, held: Counted) -> dict[str, Array]:
        """Sum over the slots of a body (`Slots.sums`): arrays [*b, ...]."""
        raise NotImplementedError

    @abstractmethod
    def rest(
        self, q: Float[Array, "B N T H"], body: Slots, tail: Slots, layer: int | Array,
        chosen: tuple[Int[Array, "B K M"], Int[Array, "B K"]], lse: Float[Array, "B N T"],
        attention: AttentionSpec,
    ) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:  # fmt: skip
        """Return (out, lse) of all slots that these queries leave out; lse is -inf if there are none.

        chosen: what `select` returned. lse: of the slots that are attended to, those of the tail included.
        """
        raise NotImplementedError


class Sampling(Read):
    """A read that samples slots: every query head draws its own, with known probabilities."""

    @abstractmethod
    def sample(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"]
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"], Float[Array, "B N P"]]:
        """Return the result of `select`, and what is added to the logits of the M * granule = P slots there.

        That is -log of the probability with which a head draws the slot, and -inf if it did not; T is 1. A
        slot is read if any head of a group draws it.
        """
        raise NotImplementedError


class Learning(Read):
    """A read whose summaries depend on statistics of the prompt's keys.

    These are learnt at the end of every prefill, for the rows that got tokens, and all summaries are then
    made with them; decode steps do not change them.
    """

    @property
    def requires(self) -> Reasons:
        return {**super().requires, **_OF_KEYS}

    @abstractmethod
    def learn(self, k: Float[Array, "*b S H"], pos: Int[Array, "*b S"]) -> dict[str, Array]:
        """Statistics of the keys of a body (`Slots.sums`): arrays [*b, ...]; pos -1 = no slot."""
        raise NotImplementedError

    @abstractmethod
    def summarise(
        self, k: Float[Array, "*b S H"], learnt: dict[str, Array] | None = None
    ) -> dict[str, Array]:
        """As in `Read`, with the result of `learn`."""
        raise NotImplementedError


class Tracing(Learning):
    """A read that learns from traces of a prompt's tokens as well as from their keys."""

    # The traces, which slots carry wherever they are.
    marks: frozenset[Trace]

    @abstractmethod
    def learn(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, k: Float[Array, "*b S H"], pos: Int[Array, "*b S"], traces: dict[str, Float[Array, "*b S"]]
    ) -> dict[str, Array]:
        """As in `Learning`; traces by their key."""
        raise NotImplementedError


class LearningFromQueries(Learning):
    """A read that learns from the prompt's newest queries as well as from its keys."""

    # From how many of the newest queries it learns.
    asks: int

    @abstractmethod
    def learn(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, k: Float[Array, "B K S H"], pos: Int[Array, "B K S"],
        asked: tuple[Float[Array, "B N W H"], Int[Array, "B W"]],
    ) -> dict[str, Array]:  # fmt: skip
        """As in `Learning`; asked: rotated queries and their positions, -1 where a prompt is shorter."""
        raise NotImplementedError
