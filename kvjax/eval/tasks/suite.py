"""Chooses suites by the names of tasks: built-in questions, those of local files, or both together."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from kvjax.base.errors import InputError
from kvjax.eval.tasks import recall, recall_tasks
from kvjax.eval.tasks.functions import Task, is_function, of_functions
from kvjax.eval.tasks.local_data import read_local
from kvjax.eval.tasks.plain_english import make_words
from kvjax.eval.tasks.published.catalogue import BenchmarkFile, asked_of, names_form
from kvjax.eval.tasks.published.suite import Published, read_published
from kvjax.eval.tasks.published.tables import KINDS, files_of
from kvjax.eval.tasks.reader import speaks_recall
from kvjax.eval.tasks.ruler.suite import ALL as RULER
from kvjax.eval.tasks.ruler.suite import LENGTH as RULER_LENGTH
from kvjax.eval.tasks.ruler.suite import TASKS as RULER_TASKS
from kvjax.eval.tasks.ruler.suite import is_ruler, make_ruler
from kvjax.eval.tasks.sample import LENGTH, TASKS, Graded, Sample, Suite, new_tokens
from kvjax.models.model import Model


@dataclasses.dataclass(frozen=True)
class RecallSuite:
    """The recall language of the shipped model: contexts of `length` tokens, questions included."""

    tasks: tuple[str, ...]
    length: int
    seed: int
    turns: int = 5
    contexts: int | None = None
    sources: tuple[str, ...] = ()

    # The longest question: a marker and four words.
    question_tokens = 5

    def rows(self, index: int, protocol: str) -> list[Sequence[Sample]]:
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

    def grade(self, sample: Sample, prediction: Sequence[int]) -> Graded:
        said, right = (" ".join(self.words(ids)) for ids in (prediction, sample.answer))
        return Graded(said, right, self.score(sample.task, prediction, sample.answer))

    def score(self, task: str, prediction: Sequence[int], answer: Sequence[int]) -> float:
        return recall_tasks.score(task, list(prediction), list(answer))

    def words(self, ids: Sequence[int]) -> list[str]:
        return [recall.WORDS[i] for i in ids]


@dataclasses.dataclass(frozen=True)
class CombinedSuite:
    """Several suites of one model together; row i has context number i of each.

    Their tasks differ in name.
    """

    parts: tuple[Suite, ...]

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(task for part in self.parts for task in part.tasks)

    @property
    def length(self) -> int:
        return max(part.length for part in self.parts)

    @property
    def contexts(self) -> int | None:
        counts = [part.contexts for part in self.parts if part.contexts is not None]
        return max(counts) if len(counts) == len(self.parts) else None

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(source for part in self.parts for source in part.sources)

    def rows(self, index: int, protocol: str) -> list[Sequence[Sample]]:
        there = [part for part in self.parts if part.contexts is None or index < part.contexts]
        return [row for part in there for row in part.rows(index, protocol)]

    def grade(self, sample: Sample, prediction: Sequence[int]) -> Graded:
        part = next(part for part in self.parts if sample.task in part.tasks)
        return part.grade(sample, prediction)

    def words(self, ids: Sequence[int]) -> list[str]:
        return self.parts[0].words(ids)


# Tasks of RULER that a model of a hundred million parameters answers, and the length at which it does.
FIRST_IN_ENGLISH = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multiquery")
# Tokenizers with fewer tokens were made for experiments, not for English.
ENGLISH_VOCAB = 8000


def default_tasks(model: Model) -> tuple[str, ...]:
    """Return the default tasks: RULER's needles for models that may read English, else recall.

    >>> from kvjax.io.load import load
    >>> default_tasks(load("recall-tiny"))
    ('get', 'chase', 'all', 'copy', 'multikey')
    """
    reads = model.tokenizer is not None and model.config.vocab >= ENGLISH_VOCAB
    return FIRST_IN_ENGLISH if reads and model.config.max_positions >= RULER_LENGTH else TASKS


def make_suite(
    model: Model,
    tasks: Sequence[str | Task] | None = None,
    *,
    length: int | None = None,
    seed: int = 0,
    contexts: int = 32,
    gold: bool = False,
) -> Suite:
    """Build the questions of a comparison: built-in tasks in the model's language, and those of local files.

    Args:
        model: the model that answers.
        tasks: built-in names (by default `default_tasks`), those of RULER ("ruler", "niah_single_1",
            "qa_1:file=dev-v2.0.json"), files of benchmarks ("kvpress:FILE" and so on, docs/tasks.md) or their
            paths alone, and functions (`kvjax.eval.tasks.functions`), also as "file.py:function".
        length: bound on context and question together, and on the answer in RULER's tasks; by default 512
            tokens, 1024 in RULER's tasks, or the longest prompt in files.
        seed: the seed of the contexts.
        contexts: at most so many records of each file are read.
        gold: a right answer is fed to the model, and its prediction at each token is graded, also in tasks
            whose answers it would otherwise generate.

    Returns:
        The questions, as a `Suite`.

    Raises:
        InputError: for whatever cannot be asked: unknown tasks, unreadable files, lengths that are too short
            for the questions or beyond the model's positions, a model without a tokenizer.

    >>> from kvjax.io.load import load
    >>> suite = make_suite(load("recall-tiny"), ["get", "copy"])
    >>> suite.tasks, suite.length, len(suite.rows(0, "aware"))
    (('get', 'copy'), 512, 2)
    """
    given = tuple(dict.fromkeys(default_tasks(model) if tasks is None else tasks))
    own = tuple(t for t in given if is_function(t))
    texts = [t for t in given if isinstance(t, str) and t not in own]
    if other := [t for t in given if t not in own and t not in texts]:
        raise InputError(f"a task is {other[0]!r:.60}, expected a name, a path of a file, or a function")
    rulers = [t for t in texts if is_ruler(t) and not Path(t).exists()]
    texts = [t for t in texts if t not in rulers]
    names = tuple(t for t in texts if not _is_path(t) and not names_form(t))
    benchmarks, paths = _files([t for t in texts if t not in names])
    if length is not None and length > model.config.max_positions:
        raise InputError(
            f"--length {length} reaches beyond the model's {model.config.max_positions} positions: shorten it"
        )
    parts: list[Suite] = []
    if names:
        parts.append(_built_in(model, names, length, seed))
    if rulers:
        parts.append(make_ruler(model, rulers, length=length, seed=seed, gold=gold))
    if benchmarks:
        parts.append(read_published(model, benchmarks, length=length, contexts=contexts))
    if paths:
        parts.append(read_local(model, paths, length=length, contexts=contexts))
    if own:
        parts.append(of_functions(model, own, length=length, seed=seed))
    every = [task for part in parts for task in part.tasks]
    if doubled := [task for i, task in enumerate(every) if task in every[:i]]:
        raise InputError(
            f"the task {doubled[0]} is named twice, built in, in a file or by a function: rename one of them"
        )
    suite = parts[0] if len(parts) == 1 else CombinedSuite(tuple(parts))
    if gold:
        _check_gold(suite)
    return suite


def _check_gold(suite: Suite) -> None:
    written = [row[-1].task for row in suite.rows(0, "agnostic") if new_tokens(row[-1])]
    if written:
        raise InputError(
            f"{written[0]} has no one right answer that could be fed, expected built-in tasks or RULER's: "
            "choose others, or leave --gold away"
        )


def notes_of(suite: Suite) -> tuple[str, ...]:
    """List what a suite skipped in its files."""
    parts = suite.parts if isinstance(suite, CombinedSuite) else (suite,)
    return tuple(note for part in parts if isinstance(part, Published) for note in part.notes)


def _files(tasks: Sequence[str]) -> tuple[list[BenchmarkFile], tuple[Path, ...]]:
    """Find the files of benchmarks, and the paths of RULER and LongBench in their own form."""
    benchmarks: list[BenchmarkFile] = []
    paths: list[Path] = []
    for task in tasks:
        found = asked_of(task)
        benchmarks += found
        if not names_form(task):
            read = {one.file for one in found}
            others = [file for file in files_of(Path(task)) if file not in read]
            paths += others if read else [Path(task)]
    return benchmarks, tuple(paths)


def _is_path(task: str) -> bool:
    looks = task.endswith(KINDS) or os.sep in task
    return looks or (task not in recall_tasks.TASKS and Path(task).exists())


def _check_names(names: tuple[str, ...], known: Sequence[str]) -> None:
    """Raise InputError for names that are no built-in task, with the nearest name of those and of RULER's."""
    for task in names:
        if task not in known:
            near = get_close_matches(task, (*known, RULER, *RULER_TASKS), 1, cutoff=0.0)[0]
            raise InputError(
                f"unknown task {task!r}: did you mean {near!r}? The built-in tasks are {', '.join(known)}; "
                "docs/tasks.md has RULER's, files and functions"
            )


def _built_in(model: Model, names: tuple[str, ...], length: int | None, seed: int) -> Suite:
    _check_names(names, tuple(recall_tasks.TASKS) if speaks_recall(model) else TASKS)
    if model.tokenizer is None and not speaks_recall(model):
        raise InputError(
            f"{model.name} has no tokenizer, and the task {names[0]} asks in words: put tokenizer.json "
            "beside its weights, or ask in token ids by tasks=[function] (docs/examples/own_task.py)"
        )
    if not speaks_recall(model):
        return make_words(model, names, length=length, seed=seed)
    try:
        suite = RecallSuite(names, length or LENGTH, seed)
        suite.rows(0, "aware")
    except ValueError as error:
        asked = "" if length is None else f"--length {length}: "
        raise InputError(f"{asked}{error}") from error
    return suite
