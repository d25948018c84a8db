"""Facts: properties of a method that some words require and others break.

A fact holds of a method until one of its words breaks it. A word's `requires` says which facts it needs and
why, and its `breaks` which ones it ends and how; `clashes` compares the words of different parts. So a new
word states its own needs, and nothing lists pairs of words.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kvjax.grammar import Method


class Fact(enum.Enum):
    """Facts that can hold of a method, each as a clause.

    >>> all(isinstance(fact.value, str) for fact in Fact)
    True
    """

    EQUAL_LISTS = "all heads of a layer have the same number of slots"
    ONE_TIER = "all slots of a list are stored alike"
    WRITTEN_ONCE = "what a slot holds stays as it was written"
    ALL_TOKENS = "every token has a slot in every layer"
    OWN_SLOTS = "every layer stores slots of its own"
    TURNED_KEYS = "keys are stored turned by their positions"
    STEADY_KEYS = "a key meets all queries turned by its position"
    MET_KEYS = "the stored keys are those that queries meet"
    MET_VALUES = "the stored values are those that the output matrix meets"
    KV_HEADS = "there is a list of slots for each KV head"
    ONE_BY_ONE = "tokens are encoded one by one"
    ONE_CODE = "codes are read alike in all layers"
    FIRST_TOKENS = "first tokens lie among the others"
    ALL_ATTENDED = "every slot is attended to in a step"
    SUMMARIES = "slots are picked in each layer by summaries of them"
    OBSERVED = "what a reading of a prompt shows of its slots is recorded"
    WHOLE_PROMPTS = "all tokens of a prompt are read at their positions"
    PLAIN_READING = "what stays of a prompt is what was read of it, without marks"
    GIVEN_WEIGHTS = "the weights are those of the model that is given"


Reasons = Mapping[Fact, str]
# For an error message: by part of the method, a method of the catalogue that does not break a fact.
INTACT = {
    (Fact.EQUAL_LISTS, "keep"): "snapkv",
    (Fact.ONE_TIER, "keep"): "snapkv",
    (Fact.WRITTEN_ONCE, "keep"): "h2o",
    (Fact.TURNED_KEYS, "keep"): "snapkv",
    (Fact.STEADY_KEYS, "keep"): "snapkv",
    (Fact.TURNED_KEYS, "store"): "int8",
    (Fact.ONE_BY_ONE, "store"): "int8",
    (Fact.ONE_CODE, "store"): "int8",
    (Fact.FIRST_TOKENS, "store"): "int8",
    (Fact.SUMMARIES, "read"): "quest",
    (Fact.OBSERVED, "reread"): "gemfilter",
    (Fact.PLAIN_READING, "reread"): "gemfilter",
}


# For an error message: a method of the catalogue that does not need a fact.
NEEDLESS = {
    (Fact.MET_KEYS, "keep"): "sink-recent",
    (Fact.MET_VALUES, "keep"): "sink-recent",
    (Fact.KV_HEADS, "keep"): "h2o",
    (Fact.ONE_BY_ONE, "keep"): "h2o",
    (Fact.OBSERVED, "keep"): "l2compress",
    (Fact.PLAIN_READING, "read"): "quest",
    (Fact.WHOLE_PROMPTS, "keep"): "snapkv",
}


class Stating:
    """The base class of words that require no fact and break none; subclasses override that."""

    @property
    def requires(self) -> Reasons:
        """Which facts it needs, and what it does that needs each (a clause with the word as subject)."""
        return {}

    @property
    def breaks(self) -> Reasons:
        """Which facts it ends, and how (a clause with the word as subject)."""
        return {}


class ReadFacts(Stating):
    """The facts of reads, which pick slots by their stored keys and attend to no others in a step.

    The newest slots that a keep leaves are always read. A slot that is not read receives no attention: a keep
    that evicts by what slots receive sees 0 there.

    >>> from kvjax.words import PageBounds
    >>> issubclass(PageBounds, ReadFacts)
    True
    """

    @property
    def requires(self) -> Reasons:
        return {
            Fact.ONE_TIER: "picks among the slots of one body",
            Fact.STEADY_KEYS: "ranks keys at their positions",
            Fact.MET_KEYS: "compares queries with stored keys",
        }

    @property
    def breaks(self) -> Reasons:
        found = {Fact.ALL_ATTENDED: "leaves slots out of a step's attention"}
        if hasattr(self, "looks_at"):
            found[Fact.SUMMARIES] = "looks at all keys"
        return found


# The facts of words that inherit from no base class here, by part.
_DEFAULTS = {"read": ReadFacts()}


class Clash(NamedTuple):
    """A fact, the part that needs it and why, the part that breaks it and how; parts are of `Method`."""

    fact: Fact
    needs: str
    why: str
    breaks: str
    how: str

    def says(self, method: Method) -> str:
        """The clash as one sentence, with what to do."""
        needing, breaking = (_name(part, getattr(method, part)) for part in (self.needs, self.breaks))
        new = INTACT.get((self.fact, self.breaks)), NEEDLESS.get((self.fact, self.needs))
        found = [f"{id} for {old}" for id, old in zip(new, (breaking, needing), strict=True) if id]
        advice = f"use {' or '.join(found)}, or leave one out" if found else "leave one out"
        needed = f"{needing} {self.why}, which needs that {self.fact.value}"
        return f"{needed}, and {breaking} {self.how}: {advice}"


def clashes(method: Method) -> Iterator[Clash]:
    """Every fact that one part of a method needs and another part breaks."""
    parts = {part: word for part in PARTS if (word := getattr(method, part)) is not None}
    for needs, word in parts.items():
        for fact, why in _stated(needs, word).requires.items():
            for breaks, other in parts.items():
                if breaks != needs and (how := _stated(breaks, other).breaks.get(fact)):
                    yield Clash(fact, needs, why, breaks, how)


PARTS = ("read", "stack", "host", "keep", "store", "reread", "make")


def _stated(part: str, word: Any) -> Stating:
    return word if hasattr(word, "breaks") else _DEFAULTS.get(part, _NOTHING)


def _name(part: str, word: Any) -> str:
    """How a message names a word: the reprs of keeps and stores are too long."""
    return f"this {part}" if part in ("keep", "store") else repr(word)


_NOTHING = Stating()
