"""Progress of long work: a bar on a terminal or in a notebook, else a few lines on standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

T = TypeVar("T")
# Seconds to the first line and between lines; the wait doubles from line to line.
FIRST, MOST = 5.0, 60.0


class Bars(Progress):
    """rich's bars; or, if the console is not a terminal, plain lines such as "reading: 3 of 8, 0:40 left".

    They go to standard error, so that a table in a pipe or a file stays a table.
    """

    def __init__(self, *columns: str | ProgressColumn, console: Console | None, transient: bool = False):
        named = TextColumn("{task.description}", markup=False)
        usual = (named, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        super().__init__(*columns or usual, console=console, transient=transient, disable=console is None)
        self._lines = console is not None and not (console.is_terminal or console.is_jupyter or console.quiet)
        self._said, self._wait = time.monotonic(), FIRST

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._say(task_id)

    def advance(self, task_id: TaskID, advance: float | int = 1) -> None:
        super().advance(task_id, advance)
        self._say(task_id)

    def say(self, line: str) -> None:
        """Print a line above the bars, which stays when they go; without a terminal to standard error."""
        if self._lines:
            with contextlib.suppress(OSError, ValueError):
                print(line, file=sys.stderr, flush=True)
        elif not self.disable:
            self.console.print(line, markup=False, highlight=False)

    def _say(self, task_id: TaskID) -> None:
        now = time.monotonic()
        if not self._lines or now - self._said < self._wait:
            return
        self._said, self._wait = now, min(2 * self._wait, MOST)
        task = self._tasks[task_id]
        left = "" if task.time_remaining is None else f", {_clock(task.time_remaining)} left"
        news = f", {task.fields['news']}" if task.fields.get("news") else ""
        of = "" if task.total is None else f" of {task.total:g}"
        with contextlib.suppress(OSError, ValueError):  # a closed standard error must not end a run
            print(f"{task.description}: {task.completed:g}{of}{left}{news}", file=sys.stderr, flush=True)


def tracked(
    what: Iterable[T], description: str, total: int | None = None, console: Console | None = None
) -> Iterator[T]:
    """Iterate over something, with a bar that disappears at the end.

    >>> list(tracked([1, 2], "reading"))
    [1, 2]
    """
    with Bars(console=console, transient=True) as bars:
        yield from bars.track(what, total=total, description=description)


def _clock(seconds: float | int) -> str:
    """Hours, minutes and seconds.

    >>> _clock(40), _clock(3700)
    ('0:40', '1:01:40')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
