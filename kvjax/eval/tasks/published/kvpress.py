"""Rows of kvpress' data sets: context, question, answer_prefix, answer, task, max_new_tokens.

Source: NVIDIA/kvpress 8bb29b9, evaluation/ and pipeline.py (Apache-2.0). The context, with the chat
template's text before it, is tokenised separately from the question, the template's end and the answer
prefix; a context that is too long loses its end.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.base.errors import InputError
from kvjax.eval.tasks import metrics
from kvjax.eval.tasks.benchmarks import LONGBENCH
from kvjax.eval.tasks.published import infinitebench
from kvjax.eval.tasks.published.record import BenchmarkForm, BenchmarkQuestion, BenchmarkRecord, Score, by_row
from kvjax.eval.tasks.published.tables import TableRow

# (row, task) -> references and score.
_Answer = Callable[[TableRow, str], tuple[tuple[str, ...], Score]]


def _record(row: TableRow, options: Mapping[str, str]) -> BenchmarkRecord:
    task = options.get("task") or row.text("task", _task_of(row))
    references, score = _family(row, task)(row, task)
    context = row.text("context")
    needles = references if task.startswith("niah") else ()
    turn = BenchmarkQuestion(
        row.text("question"), references, row.whole("max_new_tokens"), score, row.text("answer_prefix")
    )
    return BenchmarkRecord(row.where, task, context, (turn,), needles=needles)


def _task_of(row: TableRow) -> str | None:
    """Return the task of a row that does not name it."""
    if {"choice_A", "difficulty"} <= set(row.data):
        return "longbench-v2"
    place = "/".join(row.file.parts[-3:]).lower()
    return next((task for task in ("aime25", "math500") if task in place.replace("-", "")), None)


def _family(row: TableRow, task: str) -> _Answer:
    """Return the metric of a task; InputError for a task that kvpress does not have."""
    if "answers" in row.data:
        known = {**LONGBENCH, **{f"{name}_e": b for name, b in LONGBENCH.items()}}
        families: dict[str, _Answer] = dict.fromkeys(known, _longbench)
    else:
        families = {
            **dict.fromkeys(_LOOGLE, _loogle),
            "shortdep_cloze": _cloze,
            **dict.fromkeys(infinitebench.SCORES, _infinitebench),
            "longbench-v2": _choice,
            "aime25": _boxed,
            "math500": _boxed,
        }
        if task.split("_")[0] in _RULER:
            return _ruler
    if task not in families:
        near = difflib.get_close_matches(task, [*families, *_RULER], 1, cutoff=0.0)[0]
        raise InputError(
            f"{row.where}: the task {task!r} is none whose answers are scored: did you mean {near!r}? "
            "(ZeroSCROLLS keeps its answers, LongBench's rows have the field 'answers')"
        )
    return families[task]


# --- RULER ---------------------------------------------------------------------------------------------

_RULER = ("niah", "vt", "cwe", "fwe", "qa")


def _ruler(row: TableRow, task: str) -> tuple[tuple[str, ...], Score]:
    references = row.texts("answer")
    match = metrics.string_match_part if task.startswith("qa") else metrics.string_match_all
    # kvpress removes control characters, where RULER replaces them by line ends.
    return references, lambda text: match(re.sub(r"[\x00-\x1f]", "", text.strip()).strip(), references)


# --- LooGLE --------------------------------------------------------------------------------------------

_LOOGLE = ("shortdep_qa", "longdep_qa", "longdep_summarization")


def _loogle(row: TableRow, _: str) -> tuple[tuple[str, ...], Score]:
    """ROUGE-L recall, one of the five measures that kvpress lists; 0 if a document has no question."""
    answer = row.text("answer")
    return (answer,), lambda text: metrics.rouge_l_recall(text, answer)


def _cloze(row: TableRow, _: str) -> tuple[tuple[str, ...], Score]:
    """Compute the share of masks that are filled as in the answer, a dictionary."""
    answer = row.filled("answer")
    right = _dictionary(answer)
    if not right:
        raise row.wrong("answer", "a dictionary as text: {'<mask-0>': 'Ada'}")
    return (answer,), lambda text: sum(_dictionary(text).get(k) == v for k, v in right.items()) / len(right)


def _dictionary(text: str) -> dict[Any, Any]:
    try:
        found = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# --- the others ----------------------------------------------------------------------------------------


def _infinitebench(row: TableRow, task: str) -> tuple[tuple[str, ...], Score]:
    references, score = row.texts("answer"), infinitebench.SCORES[task]
    return references, lambda text: score(text, references)


def _longbench(row: TableRow, task: str) -> tuple[tuple[str, ...], Score]:
    references, classes = row.texts("answers"), row.data.get("all_classes")
    metric, named = LONGBENCH[task.removesuffix("_e")].score, tuple(map(str, classes or ()))
    # LongBench-E strips nothing.
    strip = (lambda text: text) if task.endswith("_e") else str.lstrip
    return references, lambda text: metric(strip(text), references, named)


def _choice(row: TableRow, _: str) -> tuple[tuple[str, ...], Score]:
    """LongBench v2, as kvpress scores it: the sentence with the right letter occurs, in brackets or not."""
    right = row.filled("answer")
    said = (f"The correct answer is ({right})", f"The correct answer is {right}")
    return (right,), lambda text: float(any(s in text.replace("*", "") for s in said))


def _boxed(row: TableRow, task: str) -> tuple[tuple[str, ...], Score]:
    r"""Find the content of the last \boxed{ (AIME), or the first (MATH-500), up to the next bracket."""
    (right,) = row.texts("answer")
    which = -1 if task == "aime25" else 1

    def score(text: str) -> float:
        parts = text.split("boxed{")
        return float((len(parts) > 1 or which == -1) and parts[which].split("}")[0] == right)

    return (right,), score


FORM = BenchmarkForm(
    "kvpress",
    ("context", "question", "answer_prefix", "max_new_tokens"),
    by_row(_record),
    cut="end",
    apart=True,
    plain_end="\n",
    mixed=True,
    options=("task",),
)
