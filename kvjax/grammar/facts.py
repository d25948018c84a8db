"""Facts: properties of a method that some words require and others break.

A fact holds of a method until one of its words breaks it. A word's `requires` says which facts it needs and
why, and its `breaks` which ones it ends and how; `clashes` compares the words of different parts. So a new
word states its own needs, and nothing lists pairs of words.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvjax.base.kind import Kind

if TYPE_CHECKING:
    from kvjax.grammar import Method


class Fact(enum.Enum):
    """Facts that can hold of a method, each as a clause.

    >>> all(isinstance(fact.value, str) for fact in Fact)
    True
    """

    ONE_TIER = "all slots of a KV head are stored alike"
    ALL_TOKENS = "every token has a slot in every layer"
    OWN_SLOTS = "every layer stores slots of its own"
    ROTATED_KEYS = "keys are stored rotated by their positions"
    KEYS_BY_POSITION = "a key is rotated by its position for all queries"
    STORED_KEYS = "the cache stores the keys that attention uses"
    KV_HEADS = "every KV head has slots of its own"
    ONE_BY_ONE = "tokens are encoded one by one"
    ONE_CODE = "all layers use the same codes"
    FIRST_TOKENS = "the first tokens are stored like all others"
    ALL_ATTENDED = "a step attends to every slot"
    SUMMARIES = "every layer selects slots by its own summaries"
    OBSERVED = "the layers record statistics while they read a prompt"
    WHOLE_PROMPTS = "all tokens of a prompt are read at their positions"
    PLAIN_READING = "the slots of a prompt are computed by the model's own weights"
    DENSE_PROMPTS = "every token of a prompt attends to all earlier ones"
    GIVEN_WEIGHTS = "the model keeps the weights that were given"


Reasons = Mapping[Fact, str]
# For an error message: by part of the method, a method of the catalogue that does not break a fact.
INTACT = {
    (Fact.ONE_TIER, "keep"): "snapkv",
    (Fact.ROTATED_KEYS, "keep"): "snapkv",
    (Fact.KEYS_BY_POSITION, "keep"): "snapkv",
    (Fact.ROTATED_KEYS, "store"): "int8",
    (Fact.ONE_BY_ONE, "store"): "int8",
    (Fact.ONE_CODE, "store"): "int8",
    (Fact.FIRST_TOKENS, "store"): "int8",
    (Fact.SUMMARIES, "read"): "quest",
    (Fact.OBSERVED, "reread"): "gemfilter",
    (Fact.PLAIN_READING, "reread"): "gemfilter",
}


# For an error message: a method of the catalogue that does not need a fact.
NEEDLESS = {
    (Fact.STORED_KEYS, "keep"): "sink-recent",
    (Fact.KV_HEADS, "keep"): "h2o",
    (Fact.ONE_BY_ONE, "keep"): "h2o",
    (Fact.OBSERVED, "keep"): "l2compress",
    (Fact.PLAIN_READING, "read"): "quest",
    (Fact.WHOLE_PROMPTS, "keep"): "snapkv",
    (Fact.DENSE_PROMPTS, "keep"): "snapkv",
    (Fact.DENSE_PROMPTS, "reread"): "gemfilter",
}


class Stating(Kind):
    """The base class of kinds of words that require no fact and break none; subclasses override that."""

    @property
    def requires(self) -> Reasons:
        """Which facts it needs, and what it does that needs each (a clause with the word as subject)."""
        return {}

    @property
    def breaks(self) -> Reasons:
        """Which facts it ends, and how (a clause with the word as subject)."""
        return {}


class Clash(NamedTuple):
    """A fact, the part that needs it and why, the part that breaks it and how; parts are of `Method`."""

    fact: Fact
    needs: str
    why: str
    breaks: str
    how: str

    def says(self, method: Method) -> str:
        """State the clash as one sentence, with what to do."""
        needing, breaking = (_name(part, getattr(method, part)) for part in (self.needs, self.breaks))
        new = INTACT.get((self.fact, self.breaks)), NEEDLESS.get((self.fact, self.needs))
        found = [f"{id} for {old}" for id, old in zip(new, (breaking, needing), strict=True) if id]
        advice = f"use {' or '.join(found)}, or leave one out" if found else "leave one out"
        needed = f"{needing} {self.why}, which needs that {self.fact.value}"
        return f"{needed}, and {breaking} {self.how}: {advice}"


def clashes(method: Method) -> Iterator[Clash]:
    """Return every fact that one part of a method needs and another part breaks."""
    parts = {part: word for part in PARTS if (word := getattr(method, part)) is not None}
    for needs, word in parts.items():
        for fact, why in word.requires.items():
            for breaks, other in parts.items():
                if breaks != needs and (how := other.breaks.get(fact)):
                    yield Clash(fact, needs, why, breaks, how)


PARTS = ("read", "read_prompt", "stack", "host", "keep", "store", "reread", "make")


def _name(part: str, word: Any) -> str:
    """How a message names a word: the reprs of keeps and stores are too long."""
    return f"this {part}" if part in ("keep", "store") else repr(word)
