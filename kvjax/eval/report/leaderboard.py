"""The leaderboard: results of comparisons of all methods, in one small file beside this one.

`scripts/studies/leaderboard.py` builds the file from folders that `kvjax compare` wrote, one per model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.base.errors import InputError
from kvjax.eval.report.cells import Cell, MeanScore, NominalBudget

SCHEMA = 1
DATA = Path(__file__).with_name("leaderboard.json")
_DIGITS = 4


class Line(NamedTuple):
    """One method at one budget under one protocol, over all models of the leaderboard.

    Scores and the ends of their 95% intervals are shares in [0, 1], as in `Cell`. percent:
    bytes kept, of the full cache. models: the mean on each of them. few: too few samples for intervals.
    """

    method: str
    budget: NominalBudget
    protocol: str
    mean: float
    low: float
    high: float
    percent: float
    read_percent: float
    tasks: dict[str, float]
    models: tuple[float, ...]
    few: bool


class Speed(NamedTuple):
    """A method's slowdown of prefill and speedup of decoding, relative to no compression."""

    prefill: float
    decode: float


class BoardRun(NamedTuple):
    """One model's comparison: its environment, and its cells in the order of the table."""

    about: dict[str, Any]
    cells: tuple[Cell, ...]


class Leaderboard(NamedTuple):
    """Runs on one or several models, the timings, and the environment of the timings."""

    runs: tuple[BoardRun, ...]
    speed: dict[str, Speed]
    timed: dict[str, Any]

    def lines(self, methods: Collection[str] = ()) -> list[Line]:
        """Return the cells of all models together, in the first one's order.

        methods: these methods alone, over the models on which all of them were compared.
        """
        groups: dict[tuple[str, str, str], list[Cell]] = {}
        runs = [run for run in self.runs if {*methods} <= {cell.method for cell in run.cells}]
        for cell in (cell for run in runs for cell in run.cells if not methods or cell.method in methods):
            groups.setdefault((cell.method, repr(cell.budget), cell.protocol), []).append(cell)
        return [_line(group) for group in groups.values()]


def read_leaderboard(path: Path = DATA) -> Leaderboard:
    """Read the leaderboard in a file, empty where there is none; InputError for another form of file."""
    if not path.exists():
        return Leaderboard((), {}, {})
    found = json.loads(path.read_text())
    if found.get("schema") != SCHEMA:
        raise InputError(f"{path} has schema {found.get('schema')!r}, expected {SCHEMA}: make it anew")
    runs = tuple(BoardRun(run["about"], tuple(_cell(*row) for row in run["cells"])) for run in found["runs"])
    speed = {name: Speed(*pair) for name, pair in found["speed"].items()}
    return Leaderboard(runs, speed, found["timed"])


def leaderboard_text(runs: Sequence[BoardRun], speed: Mapping[str, Speed], timed: Mapping[str, Any]) -> str:
    """Return the file's text, one cell per line."""
    parts = []
    for run in runs:
        rows = ",\n".join(json.dumps(_row(cell)) for cell in run.cells)
        parts.append(f'{{"about": {json.dumps(run.about)},\n"cells": [\n{rows}\n]}}')
    fast = ",\n".join(f"{json.dumps(name)}: {json.dumps(list(pair))}" for name, pair in speed.items())
    head = f'{{"schema": {SCHEMA},\n"timed": {json.dumps(dict(timed))},\n"speed": {{\n{fast}\n}},\n'
    return head + '"runs": [\n' + ",\n".join(parts) + "\n]}\n"


@cache
def _shipped() -> dict[str, tuple[Line, ...]]:
    found: dict[str, list[Line]] = {}
    for line in read_leaderboard().lines():
        found.setdefault(line.method, []).append(line)
    return {id: tuple(lines) for id, lines in found.items()}


def lines_of(id: str) -> tuple[Line, ...]:
    """Return the shipped leaderboard's lines of a method; none if it was not compared.

    >>> lines_of("no-such-method")
    ()
    """
    return _shipped().get(id, ())


def _row(cell: Cell) -> list[Any]:
    tasks = {
        task: [*(_short(x) for x in (score.mean, score.low, score.high)), score.samples]
        for task, score in cell.tasks.items()
    }
    sizes = [round(x) for x in (cell.kept_bytes, cell.full_bytes, cell.read_bytes)]
    return [cell.method, cell.budget, cell.protocol, *sizes, tasks]


def _short(x: float) -> float:
    return round(x, _DIGITS)


def _cell(
    method: str, budget: NominalBudget, protocol: str, kept: int, full: int, read: int, tasks: dict[str, Any]
) -> Cell:
    scores = {
        task: MeanScore(m, below, above, samples, "wilson")
        for task, (m, below, above, samples) in tasks.items()
    }
    mean, low, high = _mean_of([(s.mean, s.low, s.high) for s in scores.values()])
    return Cell(method, budget, protocol, scores, mean, low, high, kept, full, read, None)


def _mean_of(scores: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Average independent means with their intervals, as `kvjax.eval.report.cells` does for tasks."""
    mean = math.fsum(m for m, _, _ in scores) / len(scores)
    below = math.hypot(*(m - low for m, low, _ in scores)) / len(scores)
    above = math.hypot(*(high - m for m, _, high in scores)) / len(scores)
    return mean, max(0.0, mean - below), min(1.0, mean + above)


def _line(group: list[Cell]) -> Line:
    mean, low, high = _mean_of([(c.mean, c.mean_low, c.mean_high) for c in group])
    average = lambda values: math.fsum(values) / len(group)  # noqa: E731
    return Line(
        method=group[0].method,
        budget=group[0].budget,
        protocol=group[0].protocol,
        mean=mean,
        low=low,
        high=high,
        percent=average([c.percent for c in group]),
        read_percent=average([c.read_percent for c in group]),
        tasks={task: average([c.tasks[task].mean for c in group]) for task in group[0].tasks},
        models=tuple(c.mean for c in group),
        few=any(c.few for c in group),
    )


def about_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of metrics.json that readers of scores need."""
    settings = metrics["settings"]
    names = ("model", "fingerprint", "device", "dtype", "git_revision", "versions", "command")
    found = {name: metrics.get(name) for name in names}
    return found | {name: settings[name] for name in ("samples", "length", "protocols", "seed")}
