"""BABILong: facts about persons and things, scattered in a book; 20 tasks, lengths from 0k to 10M.

Prompts (babilong.json), answer length and metric: booydar/babilong 7a6efee, babilong/prompts.py and
metrics.py (arXiv:2406.10149; Apache-2.0), with instruction, examples and closing instruction. The part of the
prompt up to the book's end is the context. Rows that are too long are skipped.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvjax.base.errors import InputError
from kvjax.eval.tasks.published.record import BenchmarkForm, BenchmarkQuestion, BenchmarkRecord, by_row
from kvjax.eval.tasks.published.tables import TableRow

_NEW = 20


@functools.cache
def published() -> Mapping[str, Any]:
    """Prompts and labels of each task, as published."""
    return json.loads((Path(__file__).parent / "babilong.json").read_text(encoding="utf-8"))["tasks"]


def is_right(text: str, target: str, question: str, task: str) -> bool:
    """Whether the first sentence names the target, and no other label that the question does not name.

    >>> is_right("It is in the garden.", "garden", "Where is Ada?", "qa1")
    True
    """
    said = text.lower().split(".")[0].split("<context>")[0].split("<example>")[0]
    labels = {label.lower() for label in published()[task]["labels"]}
    named = {x for x in labels if x in said} - {x for x in labels if x in question.lower()}
    target = target.lower()
    # Lists are longer than pairs of directions, which are one label.
    wanted = set(target.split(",")) if "," in target and len(target) > 3 else {target}
    return named == wanted


def _record(row: TableRow, options: Mapping[str, str]) -> BenchmarkRecord:
    task, size = _place(row, options)
    prompt = published()[task]
    asked, target = row.filled("question"), row.filled("target")
    opens = "\n\n".join(prompt[part] for part in ("instruction", "examples", "post_prompt"))
    context = f"{opens}\n\n<context>\n{row.text('input').strip()}\n</context>\n\n".lstrip()
    score = lambda text: float(is_right(text.strip(), target, asked, task))  # noqa: E731
    turn = BenchmarkQuestion(f"Question: {asked}".rstrip(), (target,), _NEW, score)
    return BenchmarkRecord(row.where, f"babilong_{task}{size and '_' + size}", context, (turn,))


def _place(row: TableRow, options: Mapping[str, str]) -> tuple[str, str]:
    """Read the task and the length that a file and its folder name, as in qa1/4k.json or 4k/qa1.parquet."""
    parts = [re.sub(r"-\d{5}-of-\d{5}$", "", row.file.stem), row.file.parent.name]
    task = options.get("task") or next((p for p in parts if re.fullmatch(r"qa\d+", p)), "")
    if task not in published():
        raise InputError(
            f"{row.file} does not say its task, expected qa1 to qa20 as its name or its folder's: give "
            f"babilong:{row.file},task=qa1"
        )
    return task, next((p for p in parts if re.fullmatch(r"\d+[kM]", p)), "")


FORM = BenchmarkForm(
    "babilong", ("input", "question", "target"), by_row(_record), cut="skip", options=("task",)
)
