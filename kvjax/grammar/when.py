"""When slots are evicted: at the end of a prefill, or also while decoding."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import TypeVar

from jaxtyping import Array

from kvjax.base.kind import Kind

Count = TypeVar("Count", int, Array)


class When(Kind):
    """The base class of when a method evicts; all of them evict at the end of a prefill.

    `in_steps`: whether slots are evicted while decoding, too. `at_once`: whether after every token, inside
    the layer, so that the attention of its query decides.

    >>> isinstance(Every(4), When)
    True
    """

    in_steps: bool = False
    at_once: bool = False

    @abstractmethod
    def due_at(self, n: Count) -> Count | int:
        """How many slots a KV head holds when it evicts down to `n`; more than n."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class PrefillEnd(When):
    """At the end of every prefill, and never while decoding."""

    def due_at(self, n: Count) -> Count | int:
        return 2**30


@dataclasses.dataclass(frozen=True)
class Every(When):
    """While decoding too, after every `tokens` tokens: KV heads grow by as many slots, then evict them.

    Args:
        tokens: between two evictions; 1 evicts inside the step.

    >>> Every(1).at_once, Every(16).at_once
    (True, False)
    """

    tokens: int = 1
    in_steps = True

    def __post_init__(self):
        _check("Every(tokens)", self.tokens)

    @property
    def says(self) -> str:
        often = "every token" if self.tokens == 1 else f"every {self.tokens} tokens"
        return f"After {often}, each KV head evicts slots down to its budget."

    @property
    def at_once(self) -> bool:
        return self.tokens == 1

    def due_at(self, n: Count) -> Count | int:
        return n + self.tokens


@dataclasses.dataclass(frozen=True)
class WhenFull(When):
    """While decoding too, whenever a KV head holds `slots` slots; its budget is smaller.

    Args:
        slots: the number at which it evicts.

    >>> WhenFull(128).in_steps
    True
    """

    slots: int
    in_steps = True

    def __post_init__(self):
        _check("WhenFull(slots)", self.slots)

    def due_at(self, n: Count) -> Count | int:
        return self.slots


def _check(what: str, given: object) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ValueError(f"{what} needs a whole number >= 1, got {given!r}")


PREFILL_END = PrefillEnd()
STEP = Every(1)
