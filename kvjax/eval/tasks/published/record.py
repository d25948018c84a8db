"""Records of a benchmark's file: a context each, with the questions about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvjax.eval.tasks.published.tables import TableRow, read_rows
from kvjax.eval.tasks.reader import SuiteTokenizer

# Generated text -> score in [0, 1].
Score = Callable[[str], float]


class BenchmarkQuestion(NamedTuple):
    """A question: its text, the text that opens the answer, and the answer's metric.

    new_tokens: the most tokens of the answer; None: twice as many as the first reference has. task: if empty,
    that of the record.
    """

    question: str
    references: tuple[str, ...]
    new_tokens: int | None
    score: Score
    prefix: str = ""
    task: str = ""


class Dialogue(NamedTuple):
    """The questions in turn, with the right answer to each before the next one.

    users: messages, the first with the context. plain: the same as plain text for models without a chat
    template, answers included. opens: the text with which later answers begin in a chat.
    """

    users: tuple[str, ...]
    answers: tuple[str, ...]
    plain: tuple[str, ...]
    opens: str = ""


class BenchmarkRecord(NamedTuple):
    """A context and the questions about it; where: file and row. before: messages that precede the context.

    needles: texts of the context that the answer needs. name: added to the ids of its samples.
    """

    where: str
    task: str
    context: str
    turns: tuple[BenchmarkQuestion, ...]
    dialogue: Dialogue | None = None
    before: tuple[Mapping[str, Any], ...] = ()
    needles: tuple[str, ...] = ()
    name: str = ""


class RecordFile(NamedTuple):
    """A file to read records from. length: most tokens of a prompt; contexts: how many are wanted."""

    file: Path
    options: Mapping[str, str]
    reader: SuiteTokenizer
    length: int
    contexts: int


class BenchmarkForm(NamedTuple):
    """How a benchmark's files are read.

    fields: those by which a file is recognised. cut: how a prompt that is too long is handled: the end or the
    middle of its context is removed, or it is skipped. apart: context and question are tokenised separately.
    plain_end: the text after the question if the model has no chat template. mixed: a file holds several
    tasks. options: names that may follow the path.
    """

    name: str
    fields: tuple[str, ...]
    records: Callable[[RecordFile], Iterator[BenchmarkRecord]]
    cut: Literal["end", "middle", "skip"]
    apart: bool = False
    plain_end: str = ""
    mixed: bool = False
    options: tuple[str, ...] = ()


def by_row(
    read: Callable[[TableRow, Mapping[str, str]], BenchmarkRecord],
) -> Callable[[RecordFile], Iterator[BenchmarkRecord]]:
    """Make a reader of files in which every row is a record."""
    return lambda source: (read(row, source.options) for row in read_rows(source.file))


def best(metric: Callable[[str, str], float], references: tuple[str, ...]) -> Score:
    """Return the metric's largest value over the references."""
    return lambda text: max(metric(text, reference) for reference in references)
