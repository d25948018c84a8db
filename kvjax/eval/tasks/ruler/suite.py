"""RULER's tasks for a model: contexts as long as fit, with the tokens that the answer needs marked."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np

from kvjax.base.errors import InputError
from kvjax.eval.tasks import benchmarks
from kvjax.eval.tasks.chats import around_user, chat_reader
from kvjax.eval.tasks.functions import DRAWN
from kvjax.eval.tasks.reader import SuiteTokenizer
from kvjax.eval.tasks.ruler import chains, counts
from kvjax.eval.tasks.ruler.documents import FILES, draw_documents, read_documents
from kvjax.eval.tasks.ruler.needles import NEEDLES, draw_needles
from kvjax.eval.tasks.ruler.prompts import Draft
from kvjax.eval.tasks.ruler.shipped import haystack, words_of
from kvjax.eval.tasks.ruler.sizes import largest
from kvjax.eval.tasks.sample import ForcedSample, Graded, OpenSample, Sample
from kvjax.models.model import Model

# The tasks that need no file, and all of them.
GENERATED = (*NEEDLES, "vt", "cwe", "fwe")
TASKS = (*GENERATED, *FILES)
ALL, LENGTH = "ruler", 1024
_ESSAY = tuple(name for name, task in NEEDLES.items() if task.haystack == "essay")
_NO_LIMIT = 2**30


class TaskForm(NamedTuple):
    """How samples of a task are drawn: (generator, index, size) -> text, for sizes from least to most."""

    draw: Callable[[np.random.Generator, int, int], Draft]
    least: Callable[[int], int]
    most: int = _NO_LIMIT
    contexts: int | None = None
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Ruler:
    """Samples of RULER's tasks. length bounds context, question and the tokens of the answer together.

    chat: the chat template's text around a prompt; the answer's prefix follows it, as in RULER and kvpress.
    gold: a right answer is fed, and the score is the share of references whose tokens are all the model's
    likeliest; without it the model generates.
    """

    tasks: tuple[str, ...]
    length: int
    seed: int
    reader: SuiteTokenizer
    forms: Mapping[str, TaskForm]
    chat: tuple[str, str] = ("", "")
    gold: bool = False
    drawn: dict[tuple[str, int], Sample] = dataclasses.field(default_factory=dict, repr=False)
    found: dict[tuple[str, int], int] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def contexts(self) -> int | None:
        limits = [self.forms[task].contexts for task in self.tasks]
        return max((n for n in limits if n is not None), default=None) if None not in limits else None

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(sorted({form.source for form in self.forms.values() if form.source}))

    def rows(self, index: int, protocol: str) -> list[Sequence[Sample]]:
        """One row per task with one question, whatever the protocol."""
        limits = {task: self.forms[task].contexts for task in self.tasks}
        return [[self.sample(task, index)] for task, most in limits.items() if most is None or index < most]

    def grade(self, sample: Sample, prediction: Sequence[int]) -> Graded:
        """RULER's metric on the generated text, or how many references of a fed answer were predicted."""
        text = self.reader.text(prediction)
        if isinstance(sample, ForcedSample):
            right = [tuple(prediction[a:b]) == sample.answer[a:b] for a, b in sample.parts]
            return Graded(text, self.reader.text(sample.answer), sum(right) / len(right))
        assert isinstance(sample, OpenSample)
        score = _benchmark(sample.task).score(text, sample.references, ())
        return Graded(text, " | ".join(sample.references), score)

    def words(self, ids: Sequence[int]) -> list[str]:
        return self.reader.words(ids)

    def sample(self, task: str, index: int) -> Sample:
        """Sample `index` of a task; InputError if its shortest prompt does not fit."""
        if (task, index) not in self.drawn:
            self.drawn[task, index] = self._encoded(task, index, self.draft(task, index))
        return self.drawn[task, index]

    def draft(self, task: str, index: int) -> Draft:
        """Write the text of a sample, without the chat template."""
        return self._draw(task, index, self._size(task, index))

    def _draw(self, task: str, index: int, size: int) -> Draft:
        rng = np.random.default_rng([self.seed, index, crc32(task.encode())])
        return self.forms[task].draw(rng, index, size)

    def _size(self, task: str, index: int) -> int:
        """Find the largest size whose prompt and answer fit into the length."""
        if (task, index) in self.found:
            return self.found[task, index]
        form, room = self.forms[task], self.length - _benchmark(task).new_tokens
        tokens = lambda size: self._tokens(self._draw(task, index, size))  # noqa: E731
        guess = form.least(index) if index == 0 else self._size(task, 0)
        size = largest(lambda size: tokens(size) <= room, form.least(index), form.most, guess)
        if size is None:
            needed = tokens(form.least(index)) + self.length - room
            raise InputError(
                f"{task} takes at least {needed} tokens here, its answer included, and got "
                f"{self.length}: raise --length, or leave the task away"
            )
        self.found[task, index] = size
        return size

    def _tokens(self, made: Draft) -> int:
        head, tail = self.chat
        whole = head + "".join(made.context) + made.question + tail + made.prefix
        return len(self.reader.bos) + len(self.reader.split(whole)[0])

    def _encoded(self, task: str, index: int, made: Draft) -> Sample:
        head, tail = self.chat
        first, *rest = made.context
        gold = made.gold(task.partition("_")[0]) if self.gold else ()
        pieces = self.reader.split(head + first, *rest, made.question + tail + made.prefix, *gold)
        parts, question, answer = pieces[: 1 + len(rest)], pieces[1 + len(rest)], pieces[2 + len(rest) :]
        context = (*self.reader.bos, *itertools.chain(*parts))
        spans, name = _odd(parts, len(self.reader.bos)), f"{task}-{index}"
        if self.gold:
            said = tuple(itertools.chain(*answer))
            return ForcedSample(name, task, context, question, said, spans, _odd(answer))
        new = _benchmark(task).new_tokens
        return OpenSample(name, task, context, question, spans, made.references, new)


def _odd(pieces: Sequence[tuple[int, ...]], first: int = 0) -> tuple[tuple[int, int], ...]:
    """Spans [start, end) of the tokens of every second piece; `first` tokens come before all pieces."""
    ends = itertools.accumulate((len(p) for p in pieces), initial=first)
    return tuple((a, b) for a, b in [*itertools.pairwise(ends)][1::2] if b > a)


def is_ruler(task: str) -> bool:
    """Whether a task is one of RULER's, with options or without.

    >>> is_ruler("ruler"), is_ruler("qa_1:file=squad.json"), is_ruler("get")
    (True, True, False)
    """
    return task.partition(":")[0] in (ALL, *TASKS)


def make_ruler(
    model: Model, tasks: Sequence[str], *, length: int | None = None, seed: int = 0, gold: bool = False
) -> Ruler:
    """Make the tasks of these texts: "ruler" (all that need no file), names, and options as in the examples.

    Raises InputError for options that a task does not have, a model without a tokenizer, files that cannot be
    read, and lengths that are too short.

    >>> make_ruler(model, ["niah_single_2:haystack=book.txt"], length=2048)  # doctest: +SKIP
    >>> make_ruler(model, ["ruler:qa_1=dev-v2.0.json,haystack=book.txt"])  # doctest: +SKIP
    >>> make_ruler(model, ["qa_2:file=hotpot_dev_distractor_v1.json"])  # doctest: +SKIP
    """
    files: dict[str, str | None] = {}
    for task in tasks:
        for name, file in _asked(task):
            if files.setdefault(name, file) != file:
                raise InputError(f"{name} was given with two files, {files[name]} and {file}: name one")
    reader, chat = chat_reader(model), around_user(model)
    length = length or min(LENGTH, model.config.max_positions)
    suite = Ruler(tuple(files), length, seed, reader, {}, chat, gold)
    forms = {name: _form(suite, name, file) for name, file in files.items()}
    suite = dataclasses.replace(suite, forms=forms)
    suite.rows(0, "agnostic")
    return suite


def _asked(text: str) -> list[tuple[str, str | None]]:
    """Return the tasks that a text names, each with its file."""
    name, _, options = text.partition(":")
    given: dict[str, str] = {}
    for option in re.split(r",(?=\w+=)", options) if options else ():
        key, equals, value = option.partition("=")
        if not equals or not value:
            raise InputError(f"the task {text!r} has the option {option!r}, expected NAME=FILE")
        given[key] = value
    known = _options(name)
    if wrong := [key for key in given if key not in known]:
        near = difflib.get_close_matches(wrong[0], known, 1, cutoff=0.0)
        hint = f"did you mean {near[0]!r}?" if near else "it has none"
        raise InputError(f"the task {name} has no option {wrong[0]!r}: {hint}")
    if name == ALL:
        found = [(one, given.get("haystack") if one in _ESSAY else None) for one in GENERATED]
        return [*found, *((one, given[one]) for one in FILES if one in given)]
    if name in FILES and "file" not in given:
        raise InputError(f"{name} asks about documents of a file: give {name}:file=FILE, {FILES[name]}")
    return [(name, given.get("haystack", given.get("file")))]


def _options(name: str) -> tuple[str, ...]:
    if name == ALL:
        return ("haystack", *FILES)
    return ("haystack",) if name in _ESSAY else ("file",) if name in FILES else ()


def _form(suite: Ruler, name: str, file: str | None) -> TaskForm:
    """How samples of a task are drawn for the suite's length and tokenizer."""
    if name in NEEDLES:
        task = NEEDLES[name]
        text = haystack(file) if task.haystack == "essay" else None
        needles = task.num_keys * task.num_values
        least = 1 if text is not None else needles
        return TaskForm(
            lambda rng, _, size: draw_needles(task, text, rng, size),
            lambda _: least,
            source=f"{DRAWN}{text.name}" if text is not None else "",
        )
    if name == "vt":
        example = chains.example_size(lambda text: len(suite.reader.split(text)[0]))
        return TaskForm(lambda rng, _, size: chains.draw_chain(rng, size, example), lambda _: chains.HOPS + 1)
    if name == "cwe":
        most = len(words_of("all"))
        return TaskForm(
            lambda rng, _, size: counts.draw_list(rng, size, suite.length), lambda _: counts.COMMON + 1, most
        )
    if name == "fwe":
        tokens = max(suite.length - _benchmark(name).new_tokens, 1)
        fewest = counts.fewest_coded(tokens)
        return TaskForm(lambda rng, _, size: counts.draw_coded(rng, size, tokens), lambda _: fewest)
    assert file is not None
    data = read_documents(name, file)
    return TaskForm(
        lambda rng, index, size: draw_documents(data, index, rng, size),
        lambda index: len(data.questions[index].given),
        len(data.documents),
        len(data.questions),
        data.name,
    )


def _benchmark(task: str) -> benchmarks.Benchmark:
    return benchmarks.RULER[task.partition("_")[0]]
