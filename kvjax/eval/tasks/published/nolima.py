"""NoLiMa: a needle that shares no words with the question, in a book.

Placement, draws, answer length and metric ("contains"): adobe-research/NoLiMa, evaluation/ and
data/book_haystack.py (arXiv:2502.05167; Adobe Research License, not for commercial use). None of its files
ship with kvjax: needles, books and the prompt are read from a clone, from data/needlesets/*.json,
data/haystack/rand_shuffle and evaluation/run_tests.py.

Deviation: books are taken in the order of their names, and samples cycle through tests, depths and books, so
that even a few samples cover all depths. Needle sets with distractors are not read.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvjax.base.errors import InputError
from kvjax.eval.tasks.published.record import BenchmarkForm, BenchmarkQuestion, BenchmarkRecord, RecordFile
from kvjax.eval.tasks.published.tables import TableRow, read_rows
from kvjax.eval.tasks.reader import SuiteTokenizer

_NEW, _DEPTHS, _SEED = 192, 26, 42
# Tokens of a book, as published; the chat template and the needle come on top.
LENGTHS = (250, 500, 1000, 2000, 4000, 8000, 16000, 32000)
_SYSTEM = {"role": "system", "content": "You are a helpful assistant"}
_TEMPLATE_TOKENS = 64


class Test(NamedTuple):
    """A question about a needle; characters: the names from which the right answer is drawn."""

    where: str
    name: str
    needle: str
    question: str
    template: str
    seed: int
    characters: tuple[str, ...]
    answers: tuple[str, ...]


class Book(NamedTuple):
    """A haystack as ids, and the places at which a line ends."""

    ids: tuple[int, ...]
    ends: np.ndarray


def _records(source: RecordFile) -> Iterator[BenchmarkRecord]:
    template = _template(source)
    tests = [test for row in read_rows(source.file) for test in _tests(row, template)]
    files = _books(source)
    size = _size(source, tests)
    books = [read_book(source.reader, file.read_text(encoding="utf-8")) for file in files]
    for book, file in zip(books, files, strict=True):
        needed = size + 2 + int(np.diff(book.ends, append=len(book.ids)).max())
        if len(book.ids) < needed:
            raise InputError(
                f"{file} has {len(book.ids)} tokens, expected at least {needed} to take {size}: give tokens=N"
            )
    for turn, (at, test) in itertools.product(range(_DEPTHS * len(books)), enumerate(tests)):
        depth, number = (5 * at + turn) % _DEPTHS, turn // _DEPTHS
        yield _record(source.reader, test, books[number], number, depth, size)


def _record(
    reader: SuiteTokenizer, test: Test, book: Book, number: int, depth: int, size: int
) -> BenchmarkRecord:
    needle, question, answers = test.needle, test.question, test.answers
    if "{CHAR}" in needle:
        rng = np.random.RandomState(test.seed + number)
        who = [str(rng.choice(test.characters)) for _ in range(depth + 1)][depth]
        needle, question, answers = needle.replace("{CHAR}", who), question.replace("{CHAR}", who), (who,)
    text = placed(reader, book, needle, size, np.linspace(0, 100, _DEPTHS)[depth] / 100)
    before, _, after = test.template.partition("{haystack}")
    turn = BenchmarkQuestion(
        after.replace("{question}", question), answers, _NEW,
        lambda said: float(any(answer in said for answer in answers)),
    )  # fmt: skip
    name = f"{test.name}-book-{number + 1}-depth-{depth}"
    return BenchmarkRecord(
        test.where, f"nolima_{size}", before + text, (turn,), before=(_SYSTEM,), needles=(needle,), name=name
    )


def read_book(reader: SuiteTokenizer, text: str) -> Book:
    """Read a haystack's tokens."""
    ids = reader.split(text)[0]
    lines = {i for i in set(ids) if "\n" in reader.text([i])}
    return Book(ids, np.array([0, *(at for at, i in enumerate(ids) if i in lines)]))


def placed(reader: SuiteTokenizer, book: Book, needle: str, size: int, depth: float) -> str:
    """`size` tokens of a book with a needle on a line of its own at a depth from 0 to 1.

    The book is shifted so that a line ends exactly at that depth.
    """
    delta = book.ends / (size + 1) - depth
    at = int(book.ends[np.argmin(np.where(delta < 0, np.inf, delta))])
    start = at - int(np.round(size * depth))
    before = reader.text(book.ids[start : at + 1])
    before = before[: max(before.rfind("\n"), 0)]
    return f"{before} {needle}\n{reader.text(book.ids[at + 1 : start + size])}"


def _tests(row: TableRow, template: str) -> list[Test]:
    """Return the questions of one needle."""
    if row.data.get("distractors"):
        raise InputError(f"{row.where} has distractors, which are not read: take needle_set.json, or _hard")
    name, needle, asked = row.filled("id"), row.filled("needle"), row.data.get("questions")
    tests = row.data.get("tests")
    if not isinstance(asked, dict) or not asked:
        raise row.wrong("questions", "an object with a question per kind")
    if not isinstance(tests, dict) or not tests:
        raise row.wrong("tests", "an object with a test per id")
    if not name[:4].isdecimal():
        raise row.wrong("id", "a text that opens with four digits")
    characters = row.texts("character_set") if row.data.get("character_set") else ()
    template = row.text("task_template", template)
    found = []
    for kind, (label, given) in itertools.product(asked, tests.items()):
        test = TableRow(f"{row.where}, test {label}", given, row.file)
        texts = [needle, TableRow(row.where, asked, row.file).filled(kind)]
        for number, value in enumerate(given.get("input_args", ()), 1):
            texts = [text.replace(f"{{{number}}}", str(value)) for text in texts]
        if "{CHAR}" in needle and not characters:
            raise row.wrong("character_set", "a list of names")
        answers = () if "{CHAR}" in needle else test.texts("gold_answers")
        seed = _SEED + int(name[:4])
        label = f"{name}_{label}_{kind}"
        found.append(Test(test.where, label, texts[0], texts[1], template, seed, characters, answers))
    return found


def _template(source: RecordFile) -> str:
    """Read the prompt, from the option's file or from the clone that contains the needle set."""
    if given := source.options.get("template"):
        text = _read(Path(given))
    else:
        code = source.file.resolve().parents[2] / "evaluation" / "run_tests.py"
        text = _constant(code, "DEFAULT_TASK_TEMPLATE") if code.is_file() else ""
    if not all(place in text for place in ("{haystack}", "{question}")):
        raise InputError(
            f"no prompt with {{haystack}} and {{question}} was found beside {source.file}: clone "
            "adobe-research/NoLiMa and name the needle set in it, or give template=FILE"
        )
    return text


def _constant(code: Path, name: str) -> str:
    """Read a text that a Python file assigns to a name; the file does not run."""
    for node in ast.parse(_read(code)).body:
        named = isinstance(node, ast.Assign) and any(getattr(t, "id", "") == name for t in node.targets)
        if named and isinstance(node.value, ast.Constant):  # type: ignore[union-attr]
            return str(node.value.value)  # type: ignore[union-attr]
    return ""


def _books(source: RecordFile) -> list[Path]:
    default = source.file.resolve().parents[1] / "haystack" / "rand_shuffle"
    place = Path(source.options.get("haystack", default))
    files = [place] if place.is_file() else sorted(place.glob("*.txt"))
    if not files:
        raise InputError(f"{place} holds no book, expected .txt files: fetch them, or give haystack=FOLDER")
    return files


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read ({error}): check it") from error


def _size(source: RecordFile, tests: Sequence[Test]) -> int:
    """How many tokens of a book to use: as asked, or the longest published length that fits."""
    extra = (
        max(len(source.reader.split(t.template + t.needle + t.question)[0]) for t in tests) + _TEMPLATE_TOKENS
    )
    fits = source.length - _NEW - extra
    if (given := source.options.get("tokens")) is not None:
        if not given.isdecimal() or not int(given):
            raise InputError(f"tokens is {given!r}, expected a whole number, such as 1000")
        return int(given)
    if not (fitting := [size for size in LENGTHS if size <= fits]):
        raise InputError(
            f"NoLiMa's shortest prompt takes about {LENGTHS[0] + extra + _NEW} tokens with its answer, and "
            f"{source.length} were given: raise --length, or give tokens=N"
        )
    return fitting[-1]


FORM = BenchmarkForm(
    "nolima", ("needle", "questions", "tests"), _records, cut="skip",
    options=("haystack", "template", "tokens"),
)  # fmt: skip
