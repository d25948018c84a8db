"""What each kind of read promises: the words that say which slots a query visits."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jax import Array
from jaxtyping import Float, Int

from kvjax.grammar.protocols import AttentionSpec, Trace
from kvjax.state.cache import Slots


@runtime_checkable
class Read(Protocol):
    """Selects the slots of an encoded body that a query visits; the newest tokens (tail) are always read.

    Optional: `newest`: the number of tokens that always stay in the tail, else those that fill no page.
    `looks_at`: how many channels of every key `select` looks at, which are bytes that a step reads.
    `by_list`: `select` needs of a KV head only its own slots and queries (all heads of a row hold as many
    slots), so every device of a mesh selects in its own. One that adds an estimate of what it does not visit
    is `Resting`, one that weighs what it visits is `Sampling`, one whose summaries depend on the prompt's
    keys is `Learning`, and one that selects in some layers for others is `Reusing`.

    >>> from kvjax.words import Budget, PageBounds
    >>> isinstance(PageBounds(Budget(0.25)), Read)
    True
    """

    @property
    def granule(self) -> int:
        """Slots summarised together."""
        ...

    @property
    def skip_layers(self) -> int:
        """The first layers read everything."""
        ...

    def summarise(self, k: Float[Array, "*b S H"]) -> dict[str, Array]:
        """Per page of slots, what `select` ranks pages by: arrays [*b, S / granule, ...]."""
        ...

    def pages_visited(self, slots: int) -> int:
        """Most pages of a body of `slots` slots that one query visits (static)."""
        ...

    def select(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"],
        implementation: str | None = None,
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:  # fmt: skip
        """The pages of a layer of `body` that these queries attend to, and how many of them, from the first.

        M = pages_visited of the body's slots.
        """
        ...


@runtime_checkable
class Reusing(Read, Protocol):
    """A read that chooses in some layers, which read all of their slots; those above take their picks."""

    def starts(self, layers: int) -> tuple[int, ...]:
        """The layers from which on picks are made anew, in a model of so many: the next one that can does."""
        ...


@runtime_checkable
class Remembering(Read, Protocol):
    """A read whose summaries look at what is remembered of slots until they enter the body."""

    @property
    def traces(self) -> frozenset[Trace]: ...

    def summarise(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, k: Float[Array, "*b S H"], traces: dict[str, Float[Array, "*b S"]]
    ) -> dict[str, Array]:
        """As in `Read`; traces by their key."""
        ...


@runtime_checkable
class Resting(Read, Protocol):
    """A read that also answers for what it leaves out: one more part of the union that a query attends to."""

    def total(self, v: Float[Array, "*b S V"]) -> dict[str, Array]:
        """What is held of all values of a body together (`Slots.sums`): sums over slots, arrays [*b, ...].

        Values of slots that do not count are zeros.
        """
        ...

    def rest(
        self, q: Float[Array, "B N T H"], body: Slots, tail: Slots, layer: int | Array,
        chosen: tuple[Int[Array, "B K M"], Int[Array, "B K"]], lse: Float[Array, "B N T"],
        attention: AttentionSpec,
    ) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:  # fmt: skip
        """(out, lse) of all that these queries leave out; lse is -inf where that is nothing.

        chosen: what `select` gave. lse: of the slots that are attended to, those of the tail included.
        """
        ...


@runtime_checkable
class Sampling(Read, Protocol):
    """A read that visits slots by chance: every query head draws its own, and knows how likely each was."""

    def sample(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"]
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"], Float[Array, "B N P"]]:
        """What `select` gives, and what is added to the logits of the M * granule = P slots in these pages.

        That is -log of how likely a head was to draw the slot, and -inf where it did not; T is 1. Slots are
        visited where any head of a group draws them.
        """
        ...


@runtime_checkable
class Learning(Read, Protocol):
    """A read whose summaries depend on something that the prompt's keys have in common.

    It is learnt at the end of every prefill, of the rows that were given tokens, and all summaries are made
    by it then; steps leave it as it is.
    """

    def learn(self, k: Float[Array, "*b S H"], pos: Int[Array, "*b S"]) -> dict[str, Array]:
        """What is held of the keys of a body together (`Slots.sums`): arrays [*b, ...]; pos -1 = no slot."""
        ...

    def summarise(
        self, k: Float[Array, "*b S H"], learnt: dict[str, Array] | None = None
    ) -> dict[str, Array]:
        """As in `Read`, by what `learn` gave."""
        ...
