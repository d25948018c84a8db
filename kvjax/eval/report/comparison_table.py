"""The table that `kvjax compare` prints: one block per protocol, one line per method and budget."""

import re
import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvjax.eval.report.cells import Cell, MeanScore, budget_label
from kvjax.eval.report.console import make_console, print_text
from kvjax.eval.report.figures import (
    NLL_WORDS,
    Timings,
    chance,
    interval_names,
    larger_cells,
    nats,
    sample_count,
    signed,
    speed,
    tests_in_words,
)

Column = tuple[str, Callable[[Cell], Text]]

PROTOCOLS = {
    "agnostic": "the question comes after compression",
    "aware": "the question is read before compression, and its tokens stay",
    "aware-unprotected": "the question is read before compression, and may be dropped with the context",
    "multi-turn": "several questions, one conversation",
}
_UNLIMITED_COLUMNS = 10_000
_NAME_COLUMNS = 12
_TASK_COLUMNS = 5
_NONE = Text("–", style="dim")


class _Layout(NamedTuple):
    """The parts of the table that fit in a width.

    ends: the intervals of tasks. details: intervals and p of differences, and the spread of speeds. blanks:
    between columns.
    """

    ends: bool
    details: bool
    blanks: int
    missing: tuple[str, ...]


_ENDS, _READ, _WORST, _SPEED = "intervals of tasks", "bytes read", "worst task", "speed"
_LAYOUTS = (
    _Layout(ends=True, details=True, blanks=1, missing=()),
    _Layout(ends=True, details=False, blanks=0, missing=()),
    _Layout(ends=False, details=False, blanks=0, missing=(_ENDS,)),
    _Layout(ends=False, details=False, blanks=0, missing=(_ENDS, _READ)),
    _Layout(ends=False, details=False, blanks=0, missing=(_ENDS, _READ, _WORST, _SPEED)),
)


def print_table(cells: Sequence[Cell], timings: Timings, console: Console | None = None) -> None:
    """Print the comparison: bytes, scores with 95% intervals, differences to the full cache, speed.

    Scores, differences and recoveries are in percent. The layout follows the width of the console: where it
    has no room for everything, the legend names what was left out.

    Args:
      cells: from `summarise`.
      timings: (method, budget) to prefill_ms and decode_tokens_per_s; what is missing prints a dash.
      console: where to print; by default standard output, as wide as the table where that is no terminal.

    >>> from kvjax.eval.report.cells import score_of
    >>> get = {"get": score_of([1.0] * 50)}
    >>> cell = Cell("full", None, "aware", get, 1.0, 0.93, 1.0, 1024.0, 1024.0, 1024.0, None)
    >>> print_table([cell], {}, Console(width=100))  # doctest: +ELLIPSIS
    <BLANKLINE>
    aware: the question is read before compression, and its tokens stay...
    """
    console = console or make_console()
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
    print_text(console, Text(_legend(cells, layout), style="dim"))


def byte_unit(cells: Sequence[Cell]) -> tuple[str, float]:
    """Choose the unit that shows the caches of these cells in two to five digits, and its bytes.

    >>> byte_unit([Cell("full", None, "aware", {}, 1.0, 1.0, 1.0, 2e6, 2e6, 2e6, None)])
    ('KiB', 1024.0)
    """
    largest = max((cell.full_bytes for cell in cells), default=0.0)
    steps = [("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)]
    return next((step for step in steps if largest >= 10 * step[1]), ("B", 1.0))


def _legend(cells: Sequence[Cell], layout: _Layout) -> str:
    few = " n=...: n too small for an interval." if any(cell.few for cell in cells) else ""
    words = [
        f"Scores in %, {sample_count(cells)} samples per task; small figures: the 95% interval "
        f"({interval_names(cells)}).{few}",
        "Kept and read bytes in % of the full cache, recovery (rec.) and worst task in % of its score.",
    ]
    if tests := tests_in_words(cells):
        mark = "95% interval and p" if layout.details else "* where p < 0.05"
        words.append(f"vs full: what a method scores more on the same samples, in points; {mark} ({tests}).")
    if any(cell.nll is not None for cell in cells):
        words.append(NLL_WORDS)
    if heavy := larger_cells(cells):
        words.append(heavy)
    if layout.missing:
        words.append(f"No room here for: {', '.join(layout.missing)}.")
    return " ".join(words)


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
    if any(cell.host_bytes for cell in cells):
        columns.append(("host\n%", lambda cell: _digits(cell.host_percent)))
    if _READ not in layout.missing and any(cell.reads_less for cell in cells):
        columns.append(("read\n%", lambda cell: _digits(cell.read_percent)))
    for task in dict.fromkeys(task for cell in cells for task in cell.tasks):
        header = task if layout.ends else "\n".join(textwrap.wrap(task, _TASK_COLUMNS))
        columns.append((header, lambda cell, task=task: _score(cell.tasks.get(task), layout)))
    few = {False: 0, True: min((score.samples for cell in cells for score in cell.tasks.values()), default=0)}
    columns.append(("mean", lambda cell: _interval(cell.mean, cell.mean_low, cell.mean_high, few[cell.few])))
    if any(cell.nll is not None for cell in cells):
        columns.append(("−log p", lambda cell: Text(nats(cell.nll))))
    columns += _versus(cells, layout)
    columns.append(("rec.", lambda cell: _recovery(cell.recovery)))
    if _WORST not in layout.missing:
        columns.append((_WORST, _worst))
    if _SPEED not in layout.missing:
        prefill = "prefill\nms" if layout.ends else "pre-\nfill\nms"
        for header, key in ((prefill, "prefill_ms"), ("tok/s", "decode_tokens_per_s")):
            columns.append((header, lambda cell, key=key: _timing(cell, timings, key, layout)))
    return columns


def _versus(cells: Sequence[Cell], layout: _Layout) -> list[Column]:
    """Write the differences to the full cache."""
    if not any(cell.versus for cell in cells):
        return []

    def gain(cell: Cell) -> Text:
        if (found := cell.versus) is None:
            return _NONE
        text = Text(signed(100 * found.mean))
        if layout.details and found.low is not None and found.high is not None:
            text.append(f" {signed(100 * found.low)}..{signed(100 * found.high)}", "dim")
        elif not layout.details:
            text.append("*" if found.p is not None and found.p < 0.05 else " ")
        return text

    found = [("vs full" if layout.details else "vs\nfull", gain)]
    p = lambda cell: _NONE if cell.versus is None else Text(chance(cell.versus.p))  # noqa: E731
    return [*found, ("p", p)] if layout.details else found


def _names(cells: Sequence[Cell]) -> list[str]:
    """Fill the first column: a method is named once, a long name over as many of its lines as it needs."""
    names: list[str] = []
    for method in dict.fromkeys(cell.method for cell in cells):
        lines = _name_lines(method)
        rows = sum(cell.method == method for cell in cells)
        last = "\n".join(lines[rows - 1 :])
        names += ([*lines[: rows - 1], last] + [""] * rows)[:rows]
    return names


def _name_lines(method: str) -> list[str]:
    """Break a label into lines of about `_NAME_COLUMNS`; a file is shown without its folder.

    >>> _name_lines("docs/examples/keydiff.py:keydiff + int8")
    ['keydiff.py:', 'keydiff +', 'int8']
    """
    lines = [""]
    for piece in re.split(r"(?<=[\s:,=-])", re.sub(r"[^\s+:=,]*/", "", method)):
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
        return Text(f"{100 * score.mean:.0f}")
    return _interval(score.mean, score.low, score.high, score.samples if score.few else 0)


def _interval(mean: float, low: float, high: float, few: int) -> Text:
    """Write a share in percent with its interval's ends, or the number of samples if these are too `few`."""
    ends = f"n={few}" if few else f"{100 * low:.0f}–{100 * high:.0f}"
    return Text.assemble(f"{100 * mean:.0f}", (f" {ends}", "dim"))


def _recovery(share: float | None) -> Text:
    return _NONE if share is None else Text(f"{100 * share:.0f}", style=_colour(share))


def _worst(cell: Cell) -> Text:
    if cell.worst_task is None or cell.worst_recovery is None:
        return _NONE
    figure = (f"{100 * cell.worst_recovery:>3.0f}", _colour(cell.worst_recovery))
    return Text.assemble(figure, f" {cell.worst_task}")


def _colour(recovery: float) -> str:
    return "green" if recovery >= 0.95 else "yellow" if recovery >= 0.8 else "red"


def _timing(cell: Cell, timings: Timings, key: str, layout: _Layout) -> Text:
    median, spread = speed(timings.get((cell.method, cell.budget), {}), key)
    if not median:
        return _NONE
    return Text.assemble(median, (f" {spread}" if spread and layout.details else "", "dim"))
