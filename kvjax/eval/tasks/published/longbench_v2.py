"""LongBench v2: a long text, a question and four choices.

Prompt, answer length, truncation and metric: THUDM/LongBench, prompts/0shot.txt and pred.py
(arXiv:2412.15204; MIT). A user's message that is too long loses its middle. Deviations: decoding is greedy,
where the authors sample at temperature 0.1; and the remaining ids are not decoded and tokenised again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvjax.eval.tasks.published.record import BenchmarkForm, BenchmarkQuestion, BenchmarkRecord, by_row
from kvjax.eval.tasks.published.tables import TableRow

_CONTEXT = "Please read the following text and answer the question below.\n\n<text>\n{}\n</text>\n\n"
_QUESTION = (
    "What is the correct answer to this question: {}\nChoices:\n(A) {}\n(B) {}\n(C) {}\n(D) {}\n\n"
    'Format your response as follows: "The correct answer is (insert answer here)".'
)
_NEW = 128
_FIELDS = ("context", "question", "choice_A", "choice_B", "choice_C", "choice_D", "answer")


def chosen(text: str) -> str | None:
    """Find the letter that an answer names: in brackets anywhere, else without them.

    >>> chosen("The correct answer is A. No: **The correct answer is (B)**"), chosen("(C)")
    ('B', None)
    """
    text = text.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", text)
    found = found or re.search(r"The correct answer is ([A-D])", text)
    return found[1] if found else None


def _record(row: TableRow, _: Mapping[str, str]) -> BenchmarkRecord:
    right = row.text("answer")
    if right not in ("A", "B", "C", "D"):
        raise row.wrong("answer", "A, B, C or D")
    context, *asked = (row.filled(field).strip() for field in _FIELDS[:-1])
    turn = BenchmarkQuestion(
        _QUESTION.format(*asked), (right,), _NEW, lambda text: float(chosen(text) == right)
    )
    # The fields by which the authors report results.
    kind = "-".join(row.text(field, "") for field in ("difficulty", "length"))
    return BenchmarkRecord(row.where, "longbench-v2", _CONTEXT.format(context), (turn,), name=kind.strip("-"))


FORM = BenchmarkForm("longbench-v2", _FIELDS, by_row(_record), cut="middle")
