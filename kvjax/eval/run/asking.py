"""Answers the questions of a plan: every method and budget on every batch, with few compilations."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from kvjax.base.errors import InputError
from kvjax.eval.report.progress import Bars
from kvjax.eval.run.cellplan import PlannedCell, my_cells
from kvjax.eval.run.log import UnitLog
from kvjax.eval.run.plan import ComparisonPlan, ContextBatch, arrays_of
from kvjax.eval.run.runner import Runner, Unit
from kvjax.eval.tasks.rows import QuestionRows
from kvjax.eval.tasks.sample import most_new_tokens
from kvjax.grammar import Method
from kvjax.steps import PrefillOutputs

# How many batches are timed, per cell and number of rows.
TIMED = 3
# The entry whose bytes count as 100%.
FULL = PlannedCell("full", None, Method())
# How many cells run all batches before the next cells start, since a process caches the programs of only so
# many. If all cells ran on each batch in turn, programs would be evicted and compiled again for every batch.
TOGETHER = 40


def unit_key(protocol: str, number: int, entry: PlannedCell) -> str:
    """Return the name of a unit in the log of a run: one cell on one batch of questions."""
    return f"{protocol}/{number}/{entry.label}/{entry.budget!r}"


class Failure(NamedTuple):
    """A cell that raised an error and is left out of the rest of the run; trace: the traceback."""

    method: str
    budget: float | int | None
    protocol: str
    error: str
    trace: str

    @property
    def cell(self) -> tuple[str, float | int | None]:
        return self.method, self.budget

    def __str__(self) -> str:
        return f"{named(*self.cell)}, {self.protocol}: {self.error}"


def named(label: str, budget: float | int | None) -> str:
    """Name a cell as its lines begin."""
    return label if budget is None else f"{label} {budget}"


def ask(plan: ComparisonPlan, batches: list[ContextBatch], log: UnitLog, console: Console) -> list[Failure]:
    """Run every cell of a plan on every batch that the log lacks, and add the results to the log.

    A cell that fails is left out, and the others go on. If all fail, the last error is raised.
    """
    arrays = arrays_of(plan, batches)
    room = max(a.forced.shape[1] for a in arrays) + max(most_new_tokens(b.rows) for b in batches)
    entries = my_cells(plan.model, plan.entries)
    runner = Runner(plan.model, plan.suite, entries, plan.tokens, room, plan.gold, scan=plan.gold)
    failed: dict[PlannedCell, Failure] = {}
    with Bars(console=console, transient=True) as progress:
        bar = progress.add_task("reading the first prompts", total=len(batches) * len(entries))
        for cells in _groups(entries, len(batches)):
            for (protocol, number, seed, *_), rows in zip(batches, arrays, strict=True):
                todo = [e for e in cells if e not in failed and unit_key(protocol, number, e) not in log.done]
                progress.advance(bar, len(cells) - len(todo))
                if not todo:
                    continue
                prompt, read_s = runner.prompt(rows)
                full_bytes = runner.bytes_of(FULL, prompt).kept
                for entry, unit in _units(runner, todo, prompt, rows, protocol, full_bytes):
                    about = f"{named(entry.label, entry.budget)}, {protocol}"
                    progress.update(bar, description=about, advance=1)
                    if isinstance(unit, Exception):
                        failed[entry] = _failure(entry, protocol, unit)
                        if len(failed) == len(entries):
                            raise unit
                        progress.say(f"{failed[entry]}; it is left out, and the others go on")
                        continue
                    log.add(unit_key(protocol, number, entry), _record(unit, read_s, rows, seed))
                    if number == 0:
                        many = sum(b.protocol == protocol for b in batches)
                        progress.say(_row(unit, protocol, entry, many))
                    runner.make_room()
                if len(batches) == 1:
                    progress.update(bar, description="timing")
                    _time_again(
                        runner, log, batches[0], rows, [e for e in todo if e not in failed], full_bytes
                    )
    return [*failed.values()]


def _failure(entry: PlannedCell, protocol: str, error: Exception) -> Failure:
    why = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    return Failure(entry.label, entry.budget, protocol, why, trace)


def _row(unit: Unit, protocol: str, entry: PlannedCell, batches: int) -> str:
    """Return a cell's scores and bytes in the first of several batches."""
    tasks = {row["task"]: [r["score"] for r in unit.rows if r["task"] == row["task"]] for row in unit.rows}
    score = np.mean([np.mean(scores) for scores in tasks.values()])
    kept = np.mean([row["kept_bytes"] for row in unit.rows])
    more = "" if batches == 1 else f", after 1 of {batches} batches"
    return (
        f"{named(entry.label, entry.budget)}, {protocol}: {100 * score:.0f}% in {kept / 1024:.0f} KiB{more}"
    )


def _groups(entries: list[PlannedCell], batches: int) -> list[list[PlannedCell]]:
    """Order the cells as they run: all together if there is a single batch."""
    together = len(entries) if batches == 1 else TOGETHER
    return [entries[at : at + together] for at in range(0, len(entries), together)]


def _time_again(
    runner: Runner,
    log: UnitLog,
    batch: ContextBatch,
    rows: QuestionRows,
    cells: list[PlannedCell],
    full_bytes: int,
) -> None:
    """Run a single batch once more: its first run compiled, so it could not be timed."""
    prompt, read_s = runner.prompt(rows)
    for entry in cells:
        runner.make_room()
        if not runner.together and not runner.times_run(entry, rows):
            runner.unit(entry, prompt, rows, batch.protocol, full_bytes, alone=True)
        unit = runner.unit(entry, prompt, rows, batch.protocol, full_bytes, alone=True)
        log.add(unit_key(batch.protocol, batch.number, entry), _record(unit, read_s, rows, batch.seed))


def _record(unit: Unit, read_s: dict[str, float] | None, rows: QuestionRows, seed: int) -> dict[str, Any]:
    lines = [{**row, "seed": seed} for row in unit.rows]
    return {**unit._asdict(), "rows": lines, "read_s": read_s, "batch": rows.prompt.shape[0]}


def _units(
    runner: Runner,
    todo: list[PlannedCell],
    prompt: PrefillOutputs,
    rows: QuestionRows,
    protocol: str,
    full_bytes: int,
) -> Iterator[tuple[PlannedCell, Unit | Exception]]:
    """Units as they finish, or the errors that they raise."""

    def unit(entry: PlannedCell, alone: bool = False) -> Unit | Exception:
        try:
            return runner.unit(entry, prompt, rows, protocol, full_bytes, alone=alone)
        except Exception as error:
            return error

    return runner.units(unit, todo, [e for e in todo if 0 < runner.times_run(e, rows) <= TIMED])
