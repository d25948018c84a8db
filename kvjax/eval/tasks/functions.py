"""Tasks of a user's own: a Python function draws a context, a question about it and the right answer.

All three are text, which the model's tokenizer encodes, or token ids, for models without a tokenizer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np

from kvjax.base.errors import InputError
from kvjax.eval.tasks.reader import SuiteTokenizer, joiner_of, reader_of
from kvjax.eval.tasks.sample import LENGTH, ForcedSample, Graded, Sample
from kvjax.methods.user import load_function
from kvjax.models.model import Model

# (random generator, most tokens of context and question together) -> (context, question, answer).
Task = Callable[[np.random.Generator, int], tuple[Any, Any, Any]]
# The prefix of a source that is a function, whose questions are drawn anew for every seed.
DRAWN = "function "


@dataclasses.dataclass(frozen=True)
class Functions:
    """Questions that functions draw, by the function's name. Answers are fed and scored by exact match."""

    functions: Mapping[str, Task]
    model: Model
    length: int
    seed: int
    contexts: int | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.functions)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(f"{DRAWN}{name} {_digest(made)}" for name, made in self.functions.items())

    def rows(self, index: int, protocol: str) -> list[Sequence[Sample]]:
        """One row per function, with one question. InputError if the function draws nothing usable."""
        if protocol == "multi-turn":
            raise InputError(
                f"the task {self.tasks[0]} is a function, which asks one question about a context: leave out "
                "the protocol multi-turn"
            )
        return [[self._sample(name, made, index)] for name, made in self.functions.items()]

    def grade(self, sample: Sample, prediction: Sequence[int]) -> Graded:
        said, right = (_joined(self.words(ids)) for ids in (prediction, sample.answer))
        return Graded(said, right, float(tuple(prediction[: len(sample.answer)]) == sample.answer))

    def words(self, ids: Sequence[int]) -> list[str]:
        reader = self._reader()
        return [str(i) for i in ids] if reader is None else reader.words(ids)

    def _reader(self) -> SuiteTokenizer | None:
        return None if self.model.tokenizer is None else reader_of(self.model)

    def _sample(self, name: str, made: Task, index: int) -> ForcedSample:
        rng = np.random.default_rng([self.seed, index, crc32(name.encode())])
        try:
            found = made(rng, self.length)
        except Exception as error:
            raise InputError(f"the task {name} failed: {type(error).__name__}: {error}") from error
        if not isinstance(found, tuple | list) or len(found) != 3:
            raise InputError(f"the task {name} gave {found!r:.80}, expected (context, question, answer)")
        context, question, answer = self._ids(name, found)
        for what, ids in (("context", context), ("question", question), ("answer", answer)):
            if not ids:
                raise InputError(f"the task {name} gave an empty {what}, expected at least one token")
        if (size := len(context) + len(question)) > self.length:
            raise InputError(
                f"the task {name} gave a context and a question of {size} tokens, expected at most "
                f"{self.length}, its second argument"
            )
        return ForcedSample(f"{name}-{index}", name, context, question, answer, ())

    def _ids(self, name: str, pieces: Sequence[Any]) -> list[tuple[int, ...]]:
        if all(isinstance(piece, str) for piece in pieces):
            reader = reader_of(self.model)
            first, *rest = reader.split(*pieces)
            return [(*reader.bos, *first), *rest]
        out = []
        for piece in pieces:
            ids = np.asarray(piece)
            if isinstance(piece, str) or ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
                raise InputError(
                    f"the task {name} gave {piece!r:.60}, expected three texts, or three lists of token ids"
                )
            vocab = self.model.config.vocab
            if ids.min(initial=0) < 0 or ids.max(initial=0) >= vocab:
                raise InputError(
                    f"the task {name} gave ids from {ids.min()} to {ids.max()}, expected 0 to {vocab - 1}"
                )
            out.append(tuple(ids.astype(int).tolist()))
        return out


def is_function(task: Any) -> bool:
    """Whether a task is a function, or names one as "file.py:function" does."""
    return callable(task) or (isinstance(task, str) and task.rpartition(":")[0].endswith(".py"))


def task_name(task: Any) -> str:
    """Return the name of a task in tables.

    >>> task_name("mine/tasks.py:needle"), task_name("get")
    ('needle', 'get')
    """
    if callable(task):
        return getattr(task, "__name__", type(task).__name__)
    return task.rpartition(":")[2] if is_function(task) else task


def spelled(task: Any) -> str:
    """Write a task in the form of the command line of a comparison."""
    return task if isinstance(task, str) else task_name(task)


def of_functions(model: Model, tasks: Sequence[Any], *, length: int | None, seed: int) -> Functions:
    """Make the suite of functions; InputError for files without functions, and for two with one name."""
    found: dict[str, Task] = {}
    for task in tasks:
        if (name := task_name(task)) in found:
            raise InputError(f"two tasks are called {name}: rename one of the functions")
        made: Any = task if callable(task) else load_function(task)
        found[name] = made
    return Functions(found, model, length or min(LENGTH, model.config.max_positions), seed)


def _joined(words: Sequence[str]) -> str:
    return joiner_of(words).join(words).strip()


def _digest(function: Task) -> str:
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        text = repr(getattr(function, "__code__", function))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
