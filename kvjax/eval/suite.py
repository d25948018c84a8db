"""Suites: where questions come from. A suite makes samples and scores answers; it runs no model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from kvjax.eval import recall_tasks


@runtime_checkable
class Sample(Protocol):
    """One question about one context, as ids; spans are the [start, end) of the context it needs."""

    id: str
    task: str
    context: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


@runtime_checkable
class Suite(Protocol):
    """A source of rows: each is one context with one question, or several asked in turn."""

    tasks: tuple[str, ...]
    length: int

    def rows(self, index: int, protocol: str) -> list[list[Any]]: ...

    def score(self, task: str, prediction: Sequence[int], answer: Sequence[int]) -> float: ...

    def words(self, ids: Sequence[int]) -> list[str]: ...


@dataclasses.dataclass(frozen=True)
class Recall:
    """The recall language of the shipped model: contexts of `length` tokens, questions included."""

    tasks: tuple[str, ...]
    length: int
    seed: int
    turns: int = 5

    # The longest question: a marker and four words.
    question_tokens = 5

    def rows(self, index: int, protocol: str) -> list[list[Any]]:
        """One row per task about context number `index`; one row with several turns for "multi-turn"."""
        tokens = self.length - self.question_tokens
        if protocol == "multi-turn":
            return [
                recall_tasks.conversation(
                    self.tasks, seed=self.seed, index=index, tokens=tokens, turns=self.turns
                )
            ]
        samples = recall_tasks.context_samples(self.tasks, seed=self.seed, index=index, tokens=tokens)
        return [[s] for s in samples]

    def score(self, task: str, prediction: Sequence[int], answer: Sequence[int]) -> float:
        return recall_tasks.score(task, list(prediction), list(answer))

    def words(self, ids: Sequence[int]) -> list[str]:
        from kvjax.eval.recall import WORDS

        return [WORDS[i] for i in ids]
