"""The types common to all suites of questions: samples, grades, and the interface of a suite.

The answer of a `ForcedSample` is fed to the model token by token, and the model's prediction at each position
is compared with it. An `OpenSample` is answered in the model's own words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

TASKS = ("get", "chase", "all", "copy", "multikey")
LENGTH = 512


@runtime_checkable
class Sample(Protocol):
    """One question about one context, as ids; spans are the [start, end) of the tokens that it needs."""

    @property
    def id(self) -> str: ...
    @property
    def task(self) -> str: ...
    @property
    def context(self) -> tuple[int, ...]: ...
    @property
    def question(self) -> tuple[int, ...]: ...
    @property
    def answer(self) -> tuple[int, ...]: ...
    @property
    def spans(self) -> tuple[tuple[int, int], ...]: ...


@dataclasses.dataclass(frozen=True)
class ForcedSample:
    """A question whose right answer is fed token by token and compared with the model's predictions.

    spans are the [start, end) of the needed records in the context; parts are those of the answer that are
    graded, () for all of it.
    """

    id: str
    task: str
    context: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    parts: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class OpenSample:
    """A question answered in the model's own words, up to `max_new_tokens`; it must be a row's last one.

    Nothing is forced, so `answer` is empty; the written text is scored against `references` (and, for
    classification, `classes`).
    """

    id: str
    task: str
    context: tuple[int, ...]
    question: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    references: tuple[str, ...]
    max_new_tokens: int
    classes: tuple[str, ...] = ()
    answer: tuple[int, ...] = ()


class Graded(NamedTuple):
    """The predicted answer, the right one, and the score in [0, 1]."""

    prediction: str
    answer: str
    score: float


@runtime_checkable
class Suite(Protocol):
    """A source of rows: each is one context with one question, or several asked in turn.

    length bounds context and question together. contexts: how many there are, None for any number.
    sources: what besides the arguments decides the questions, such as the contents of files.
    """

    @property
    def tasks(self) -> tuple[str, ...]: ...
    @property
    def length(self) -> int: ...
    @property
    def contexts(self) -> int | None: ...
    @property
    def sources(self) -> tuple[str, ...]: ...

    def rows(self, index: int, protocol: str) -> list[Sequence[Sample]]:
        """Return the rows about context number `index`."""
        ...

    def grade(self, sample: Sample, prediction: Sequence[int]) -> Graded: ...

    def words(self, ids: Sequence[int]) -> list[str]:
        """One readable word per token."""
        ...


def new_tokens(sample: Sample) -> int:
    """How many tokens the model generates: 0 for samples whose answer is forced."""
    return sample.max_new_tokens if isinstance(sample, OpenSample) else 0


def most_new_tokens(rows: Sequence[Sequence[Sample]]) -> int:
    """Return the largest `new_tokens` of rows of samples: the free slots needed beyond forced tokens."""
    return max((new_tokens(sample) for row in rows for sample in row), default=0)
