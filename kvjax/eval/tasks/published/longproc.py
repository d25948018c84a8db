"""LongProc: long outputs that follow a procedure, checked step by step or by their result.

Data and metrics: princeton-pli/LongProc and its rows in the hub's PrincetonPli/LongProc (arXiv:2501.05414;
Apache-2.0); answer lengths are those of lm-evaluation-harness. The score is the benchmark's accuracy, and the
rows' F1 for html_to_tsv. All of the prompt but its last paragraph is the context. pseudo_to_code is not read:
its metric compiles and runs generated code.
"""

from __future__ import annotations

import csv
import json
import re
import string
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from kvjax.base.errors import InputError
from kvjax.eval.tasks.metrics import normalise_answer
from kvjax.eval.tasks.published.record import BenchmarkForm, BenchmarkQuestion, BenchmarkRecord, by_row
from kvjax.eval.tasks.published.tables import TableRow

_NEW = {"0.5k": 1024, "2k": 3072, "8k": 9216}
_TOM = r"\b(a|an|the|on|in|at|step|thinks?|believes?|is|are|of|location|knows?|belief)\b"


def inside(text: str, tag: str) -> str | None:
    """Return the text between the first <tag> and the first </tag>."""
    start, end = text.find(f"<{tag}>"), text.find(f"</{tag}>")
    return None if start < 0 or end < 0 else text[start + len(tag) + 2 : end].strip()


def _route(text: str, right: str, _: Mapping[str, Any]) -> float:
    return float(inside(text, "Route") == right.strip())


def _beliefs(text: str, right: str, _: Mapping[str, Any]) -> float:
    return float(_listed(text) == _listed(right))


def _listed(text: str) -> list[str]:
    """Lines that open with a dash, without small words."""
    block = "\n".join(x for x in text.splitlines() if x.strip().startswith("-")).strip()
    plain = str.maketrans("", "", string.punctuation + "’")
    lines = (line.split("-", 1)[1].lower().translate(plain) for line in block.split("\n") if line[:1] == "-")
    found = (" ".join(re.sub(_TOM, " ", line).split()) for line in lines)
    return [line for line in found if line]


def _countdown(text: str, _: str, given: Mapping[str, Any]) -> float:
    """1 if three equations use each number once and end at the target."""
    solution, left = inside(text, "Solution"), list(given["nums"])
    lines = (solution or "").split("\n")
    if len(lines) != 3:
        return 0.0
    for line in lines:
        if (step := _equation(line)) is None:
            return 0.0
        *used, result = step
        for number in used:
            if number not in left:
                return 0.0
            left.remove(number)
        left.append(result)
    return float(left[0] == given["target"])


def _equation(line: str) -> tuple[int, int, int] | None:
    """Find a, b and c of a right equation a + b = c, with any of the four operations."""
    found = re.fullmatch(r"\s*(-?\d+)\s*([-+*/])\s*(\d+)\s*=\s*(-?\d+)\s*", line)
    if found is None:
        return None
    a, b, c = int(found[1]), int(found[3]), int(found[4])
    if a < 0 and found[2] != "+":
        # The authors treat such a sign as the operation.
        return None
    if found[2] == "/":
        right = b != 0 and Fraction(a, b) == c
    else:
        right = {"+": a + b, "-": a - b, "*": a * b}[found[2]] == c
    return (a, b, c) if right else None


def _travel(text: str, _: str, given: Mapping[str, Any]) -> float:
    """1 if the plan visits the right cities for the right numbers of days."""
    cities = [x for x in given["ground_truth_cities"].split("**") if x]
    days = [int(x) for x in given["ground_truth_durations"].split("**") if x]
    stays = _stays(inside(text, "Plan") or "")
    return float(stays[: len(cities)] == list(zip(cities, days, strict=False)))


def _stays(plan: str) -> list[tuple[str, int]]:
    """Cities and days of a plan, by its flights and its last "Day 1-3"; nothing after the trip's last day."""
    total, ends, flights = None, [], []
    for line in plan.split("\n"):
        if found := re.search(r"European cities for (\d+) days", line):
            total = int(found[1])
        if found := re.search(r"\d+-(\d+)", line):
            ends.append(int(found[1]))
            if ends[-1] == total:
                break
        if found := re.search(r".*Day (\d+).*from (\w+) to (\w+)", line):
            flights.append(found.groups())
    if not ends or not flights:
        return []
    at = [1, *(int(day) for day, _, _ in flights), ends[-1]]
    cities = [flights[0][1], *(to for _, _, to in flights)]
    return [(city, at[i + 1] - at[i] + 1) for i, city in enumerate(cities)]


def _rows_f1(text: str, right: str, _: Mapping[str, Any]) -> float:
    """F1 of the rows of two tables, in any order, cells compared without case, marks, articles and blanks."""
    found = re.search(r"```tsv([\s\S]*)```", text)
    said = found[1] if found else text.split("```tsv")[1] if "```tsv" in text else text
    tables = [_table(part) for part in (said, right)]
    if not all(tables) or len({len(row) for table in tables for row in table}) != 1:
        return 0.0
    shares = [sum(row in b for row in a) / len(a) for a, b in (tables, tables[::-1])]
    return 2 * shares[0] * shares[1] / sum(shares) if sum(shares) else 0.0


def _table(text: str) -> list[list[str]]:
    """Rows below the header; a row of another length counts as missing, and is dropped if it is the last."""
    try:
        header, *rows = csv.reader(text.strip().split("\n"), delimiter="\t")
    except (ValueError, csv.Error):
        return []
    if rows and len(rows[-1]) != len(header):
        rows = rows[:-1]
    rows = [row if len(row) == len(header) else ["N/A"] * len(header) for row in rows]
    return [[normalise_answer(cell).replace(" ", "") for cell in row] for row in rows]


_Metric = Callable[[str, str, Mapping[str, Any]], float]
SCORES: Mapping[str, _Metric] = {
    "path_traversal": _route,
    "tom_tracking": _beliefs,
    "countdown": _countdown,
    "travel_planning": _travel,
    "html_to_tsv": _rows_f1,
}
# Fields of "metadata" that a task's score needs.
_NEEDS = {
    "countdown": ("nums", "target"),
    "travel_planning": ("ground_truth_cities", "ground_truth_durations"),
}


def _record(row: TableRow, options: Mapping[str, str]) -> BenchmarkRecord:
    name, size = _task_of(row, options)
    right, given, metric = row.filled("reference_output"), _metadata(row, name), SCORES[name]
    prompt = row.filled("input_prompt")
    at = prompt.rstrip().rfind("\n\n")
    turn = BenchmarkQuestion(
        prompt[max(at, 0) :], (right,), _NEW[size], lambda text: metric(text, right, given)
    )
    return BenchmarkRecord(row.where, f"longproc_{name}_{size}", prompt[: max(at, 0)], (turn,))


def _metadata(row: TableRow, task: str) -> Mapping[str, Any]:
    if task not in _NEEDS:
        return {}
    given = row.data.get("metadata")
    try:
        given = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise row.wrong("metadata", "an object in JSON") from error
    if not isinstance(given, dict) or not all(field in given for field in _NEEDS[task]):
        raise row.wrong("metadata", f"an object in JSON with {' and '.join(_NEEDS[task])}")
    return given


def _task_of(row: TableRow, options: Mapping[str, str]) -> tuple[str, str]:
    """Return the task and its size, as path_traversal_2k: of the option, or of the file or its folders."""
    for part in (options.get("task", ""), *reversed(row.file.parts[-3:])):
        if found := re.search(rf"({'|'.join([*SCORES, 'pseudo_to_code'])})_(0\.5k|2k|8k)", part):
            if found[1] in SCORES:
                return found[1], found[2]
            raise InputError(f"{row.file} holds programs to compile and run, which is not done: leave it out")
    raise InputError(
        f"{row.file} does not say its task, expected {', '.join(SCORES)} with _0.5k, _2k or _8k in its name "
        f"or its folder's: give longproc:{row.file},task=path_traversal_0.5k"
    )


FORM = BenchmarkForm(
    "longproc", ("input_prompt", "reference_output"), by_row(_record), cut="skip", options=("task",)
)  # fmt: skip
