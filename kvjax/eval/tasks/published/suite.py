"""A suite of benchmark records: prompts, answer lengths and scores of each row as published."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvjax.base.errors import InputError
from kvjax.eval.tasks.published.catalogue import BenchmarkFile
from kvjax.eval.tasks.published.prompts import Chats, Encoder, TooLong
from kvjax.eval.tasks.published.record import BenchmarkRecord, RecordFile, Score
from kvjax.eval.tasks.reader import SuiteTokenizer
from kvjax.eval.tasks.sample import Graded, OpenSample, Sample
from kvjax.models.model import Model

Context = list[OpenSample]
# The fields in which the files of one table differ.
_SHARD = re.compile(r"-\d{5}-of-\d{5}")


@dataclasses.dataclass(frozen=True)
class Published:
    """Samples by task and context number; conversations are separate, if the benchmark has them.

    scores: by the id of a sample. notes: on rows that were skipped.
    """

    tasks: tuple[str, ...]
    length: int
    sources: tuple[str, ...]
    single: Mapping[str, Sequence[Context]]
    turns: Mapping[str, Sequence[Context]]
    scores: Mapping[str, Score]
    reader: SuiteTokenizer
    notes: tuple[str, ...] = ()

    @property
    def contexts(self) -> int:
        return max(len(contexts) for contexts in self.single.values())

    def rows(self, index: int, protocol: str) -> list[Sequence[Sample]]:
        """One row per question about context number `index` of each task.

        multi-turn: each question follows the earlier ones with their right answers. All other protocols ask
        each question over the compressed context alone. InputError for several turns of a task with one
        question.
        """
        found = self.turns if protocol == "multi-turn" else self.single
        if missing := [task for task in self.single if task not in found]:
            raise InputError(
                f"{missing[0]} asks one question about a context: leave out the protocol multi-turn"
            )
        return [
            [sample] for contexts in found.values() if index < len(contexts) for sample in contexts[index]
        ]

    def grade(self, sample: Sample, prediction: Sequence[int]) -> Graded:
        """Grade the generated text by the benchmark's metric for this row."""
        assert isinstance(sample, OpenSample)
        text = self.reader.text(prediction)
        return Graded(text, " | ".join(sample.references), self.scores[sample.id](text))

    def words(self, ids: Sequence[int]) -> list[str]:
        return self.reader.words(ids)


class _Made:
    """The samples read so far."""

    def __init__(self) -> None:
        self.single: dict[str, list[Context]] = {}
        self.turns: dict[str, list[Context]] = {}
        self.scores: dict[str, Score] = {}
        self.places: dict[str, Path] = {}
        self.notes: list[str] = []

    def add(self, record: BenchmarkRecord, encoder: Encoder) -> None:
        """Encode a record and add it to its task. TooLong if its form skips it."""
        number = len(self.single.get(record.task, ()))
        name = f"{record.task}-{number}{record.name and '-' + record.name}"
        one = encoder.samples(record, name)
        self.single.setdefault(record.task, []).append(one)
        made = [one]
        if record.dialogue is not None:
            made.append(encoder.dialogue(record, name))
            self.turns.setdefault(record.task, []).append(made[-1])
        for samples in made:
            for sample, turn in zip(samples, record.turns, strict=True):
                self.scores[sample.id] = turn.score


def read_published(
    model: Model, asked: Sequence[BenchmarkFile], *, length: int | None = None, contexts: int = 32
) -> Published:
    """Read the questions of benchmarks' files; at most `contexts` records per task, in the files' order.

    length: the most tokens of a prompt; by default as many as the model has positions.

    Raises InputError for rows that lack a field, with file, row and field; for files that are unreadable or
    empty; for a task in two files; and if no row fits.

    >>> read_published(model, asked_of("scbench_kv.jsonl"), contexts=4).tasks  # doctest: +SKIP
    ('scbench_kv',)
    """
    made, chats = _Made(), Chats(model)
    for one in asked:
        _read(made, one, chats, length, contexts)
    samples = [s for group in (made.single, made.turns) for c in group.values() for x in c for s in x]
    tasks = tuple(dict.fromkeys(sample.task for sample in samples))
    most = max(len(s.context) + len(s.question) for c in made.single.values() for x in c for s in x)
    most = max([most, *(len(x[0].context) + 1 for c in made.turns.values() for x in c)])
    sources = tuple(f"{one.file.name}:{_digest(one.file)}" for one in asked)
    return Published(
        tasks, most, sources, made.single, made.turns, made.scores, chats.reader, tuple(made.notes)
    )


def _read(made: _Made, one: BenchmarkFile, chats: Chats, length: int | None, contexts: int) -> None:
    """Add the records of one file."""
    form = one.form
    encoder = Encoder(chats, form, length, one.max_new_tokens)
    most = chats.model.config.max_positions if length is None else length
    options = {**one.options}
    left_out, why, taken = 0, "", 0
    for record in form.records(RecordFile(one.file, options, encoder.reader, most, contexts)):
        place = made.places.setdefault(record.task, one.file)
        if place.with_name(_SHARD.sub("", place.name)) != one.file.with_name(_SHARD.sub("", one.file.name)):
            raise InputError(
                f"{one.file} holds the task {record.task}, and {place} does, too: name one of them"
            )
        if len(made.single.get(record.task, ())) >= contexts:
            if form.mixed:
                continue
            break
        try:
            made.add(record, encoder)
            taken += 1
        except TooLong as error:
            left_out, why = left_out + 1, why or f"{record.where} has {error}"
    if left_out and not taken:
        raise InputError(
            f"no row of {one.file} fits ({why}): give a model of more positions, a higher --length, or fewer "
            f"tokens to the answer ({form.name}:FILE,max_new_tokens=N)"
        )
    if left_out:
        made.notes.append(f"{one.file}: {left_out} rows are too long and left out ({why})")


def _digest(file: Path) -> str:
    with open(file, "rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()[:16]
