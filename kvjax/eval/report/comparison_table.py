"""The table that `kvjax compare` prints: one block per protocol, one line per method and budget."""

import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvjax.eval.report.cells import Cell, MeanScore, NominalBudget, budget_label

Timings = Mapping[tuple[str, NominalBudget], Mapping[str, float]]
Column = tuple[str, Callable[[Cell], Text]]

PROTOCOLS = {
    "agnostic": "the question comes after compression",
    "aware": "the question is seen before compression",
    "multi-turn": "several questions, one conversation",
}
_UNATTENDED_COLUMNS = 140
_UNLIMITED_COLUMNS = 10_000
_NAME_COLUMNS = 12
_TASK_COLUMNS = 5
_INTERVALS = {"wilson": "Wilson for 0/1 scores", "bootstrap": "bootstrap for fractional scores"}
_NONE = Text("–", style="dim")


class _Layout(NamedTuple):
    """What a width has room for: both ends of intervals or ±, blanks between columns, and what is missing."""

    ends: bool
    blanks: int
    missing: tuple[str, ...]


_READ, _WORST, _SPEED = "bytes read", "worst task", "speed"
_LAYOUTS = (
    _Layout(ends=True, blanks=1, missing=()),
    _Layout(ends=False, blanks=0, missing=()),
    _Layout(ends=False, blanks=0, missing=(_READ,)),
    _Layout(ends=False, blanks=0, missing=(_READ, _WORST, _SPEED)),
)


def print_table(cells: Sequence[Cell], timings: Timings, console: Console | None = None) -> None:
    """Prints the comparison: measured bytes, score per task with 95% interval, recovery, worst task, speed.

    Scores and recoveries are in percent. The layout follows the width of the console: with room, intervals
    are shown by their ends; in about 100 columns by their longer side (±); below that the legend names the
    columns that were left out.

    Args:
      cells: from `summarise`.
      timings: (method, budget) to prefill_ms and decode_tokens_per_s; what is missing prints a dash.
      console: where to print; by default standard output, 140 columns wide when that is not a terminal.

    >>> from kvjax.eval.report.cells import score_of
    >>> get = {"get": score_of([1.0] * 50)}
    >>> cell = Cell("full", None, "aware", get, 1.0, 0.93, 1.0, 1024.0, 1024.0, 1024.0, None)
    >>> print_table([cell], {}, Console(width=100))  # doctest: +ELLIPSIS
    <BLANKLINE>
    aware: the question is seen before compression...
    """
    console = console or _default_console()
    unlimited = console.options.update(max_width=_UNLIMITED_COLUMNS)
    protocols = list(dict.fromkeys(cell.protocol for cell in cells))
    blocks = [[cell for cell in cells if cell.protocol == protocol] for protocol in protocols]
    layout, tables = _LAYOUTS[-1], []
    for layout in _LAYOUTS:
        tables = [_table(block, timings, layout) for block in blocks]
        if all(Measurement.get(console, unlimited, table).maximum <= console.width for table in tables):
            break
    for protocol, table in zip(protocols, tables, strict=True):
        explanation = PROTOCOLS.get(protocol)
        console.print()
        console.print(Text(f"{protocol}: {explanation}" if explanation else protocol, style="bold"))
        console.print(table)
    console.print()
    console.print(Text(_legend(cells, layout), style="dim"))


def interval_names(cells: Sequence[Cell]) -> str:
    """How the intervals of these cells were made, in words.

    >>> from kvjax.eval.report.cells import score_of
    >>> get = {"get": score_of([1.0])}
    >>> interval_names([Cell("full", None, "aware", get, 1.0, 0.2, 1.0, 8.0, 8.0, 8.0, None)])
    'Wilson for 0/1 scores'
    """
    present = {score.interval for cell in cells for score in cell.tasks.values()}
    return ", ".join(words for kind, words in _INTERVALS.items() if kind in present)


def byte_unit(cells: Sequence[Cell]) -> tuple[str, float]:
    """The unit that shows the caches of these cells in two to five digits, and its bytes.

    >>> byte_unit([Cell("full", None, "aware", {}, 1.0, 1.0, 1.0, 2e6, 2e6, 2e6, None)])
    ('KiB', 1024.0)
    """
    largest = max((cell.full_bytes for cell in cells), default=0.0)
    steps = [("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)]
    return next((step for step in steps if largest >= 10 * step[1]), ("B", 1.0))


def _default_console() -> Console:
    console = Console()
    # rich assumes 80 columns for a log file or a pipe, where nothing limits the width.
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_UNATTENDED_COLUMNS)


def _legend(cells: Sequence[Cell], layout: _Layout) -> str:
    counts = sorted({score.samples for cell in cells for score in cell.tasks.values()})
    samples = "–".join(str(count) for count in dict.fromkeys([*counts[:1], *counts[-1:]]))
    form = "small figures and ±: ends and longer side of" if layout.ends else "±: longer side of"
    missing = f" No room here for: {', '.join(layout.missing)}." if layout.missing else ""
    return (
        f"Scores in %, {samples} samples per task; {form} the 95% interval ({interval_names(cells)}). "
        "Kept and read bytes in % of the full cache, recovery (rec.) and worst task in % of its score."
        f"{missing}"
    )


def _table(cells: Sequence[Cell], timings: Timings, layout: _Layout) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, layout.blanks, 0, 0),
        header_style="bold",
    )
    table.add_column("method", no_wrap=True)
    columns = _columns(cells, timings, layout)
    for header, _ in columns:
        table.add_column(header, justify="left" if header == _WORST else "right", overflow="fold")
    for name, cell in zip(_names(cells), cells, strict=True):
        table.add_row(Text(name, style="bold"), *(show(cell) for _, show in columns))
    return table


def _columns(cells: Sequence[Cell], timings: Timings, layout: _Layout) -> list[Column]:
    unit, divisor = byte_unit(cells)
    columns: list[Column] = [
        ("budget", lambda cell: Text(budget_label(cell.budget).removesuffix(" slots"))),
        (f"kept\n{unit}", lambda cell: _digits(cell.kept_bytes / divisor)),
        ("kept\n%", lambda cell: _digits(cell.percent)),
    ]
    if _READ not in layout.missing and any(cell.reads_less for cell in cells):
        columns.append(("read\n%", lambda cell: _digits(cell.read_percent)))
    for task in dict.fromkeys(task for cell in cells for task in cell.tasks):
        header = task if layout.ends else "\n".join(textwrap.wrap(task, _TASK_COLUMNS))
        columns.append((header, lambda cell, task=task: _score(cell.tasks.get(task), layout)))
    columns.append(("mean", lambda cell: _plus_minus(cell.mean, cell.mean_low, cell.mean_high)))
    columns.append(("rec.", lambda cell: _recovery(cell.recovery)))
    if _WORST not in layout.missing:
        columns.append((_WORST, _worst))
    if _SPEED not in layout.missing:
        prefill = "prefill\nms" if layout.ends else "pre-\nfill\nms"
        columns.append((prefill, lambda cell: _timing(cell, timings, "prefill_ms")))
        columns.append(("tok/s", lambda cell: _timing(cell, timings, "decode_tokens_per_s")))
    return columns


def _names(cells: Sequence[Cell]) -> list[str]:
    """The first column: a method is named once, a long name over as many of its lines as it needs."""
    names: list[str] = []
    for method in dict.fromkeys(cell.method for cell in cells):
        lines = _name_lines(method)
        rows = sum(cell.method == method for cell in cells)
        last = "\n".join(lines[rows - 1 :])
        names += ([*lines[: rows - 1], last] + [""] * rows)[:rows]
    return names


def _name_lines(method: str) -> list[str]:
    """A label in lines of about `_NAME_COLUMNS`, broken where a reader would; a file goes without its folder.

    >>> _name_lines("docs/examples/keydiff.py:keydiff + int8")
    ['keydiff.py:', 'keydiff +', 'int8']
    """
    lines = [""]
    for piece in re.split(r"(?<=[\s:,=-])", re.sub(r"[^\s+]*/", "", method)):
        if lines[-1] and len((lines[-1] + piece).rstrip()) > _NAME_COLUMNS:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def _digits(value: float) -> Text:
    return Text(f"{value:.0f}" if value >= 100 else f"{value:.1f}")


def _score(score: MeanScore | None, layout: _Layout) -> Text:
    if score is None:
        return _NONE
    if not layout.ends:
        return _plus_minus(score.mean, score.low, score.high)
    return Text.assemble(f"{100 * score.mean:.0f}", (f" {100 * score.low:.0f}–{100 * score.high:.0f}", "dim"))


def _plus_minus(mean: float, low: float, high: float) -> Text:
    return Text.assemble(f"{100 * mean:.0f}", (f"±{100 * max(high - mean, mean - low):.0f}", "dim"))


def _recovery(share: float | None) -> Text:
    return _NONE if share is None else Text(f"{100 * share:.0f}", style=_colour(share))


def _worst(cell: Cell) -> Text:
    if cell.worst_task is None or cell.worst_recovery is None:
        return _NONE
    figure = (f"{100 * cell.worst_recovery:>3.0f}", _colour(cell.worst_recovery))
    return Text.assemble(figure, f" {cell.worst_task}")


def _colour(recovery: float) -> str:
    return "green" if recovery >= 0.95 else "yellow" if recovery >= 0.8 else "red"


def _timing(cell: Cell, timings: Timings, key: str) -> Text:
    timing = timings.get((cell.method, cell.budget), {})
    return Text(f"{timing[key]:.0f}") if key in timing else _NONE
