"""The page's table of all cells: sortable, filterable, and downloadable as CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from kvjax.eval.report.cells import Cell, MeanScore, budget_label
from kvjax.eval.report.comparison_table import PROTOCOLS, byte_unit
from kvjax.eval.report.export import cell_records, csv_text
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
from kvjax.eval.report.method_cards import families_of, linked
from kvjax.eval.report.paired import Difference
from kvjax.eval.report.svg_plot import MethodStyle


class _Shape(NamedTuple):
    """The columns of a row besides its method: tasks, unit of bytes, host memory, -log p, methods' looks."""

    tasks: Sequence[str]
    unit: tuple[str, float]
    far: bool
    fed: bool
    looks: Mapping[str, MethodStyle]


def table_section(cells: Sequence[Cell], timings: Timings | None, looks: Mapping[str, MethodStyle]) -> str:
    """Make the section of all cells: a table that sorts, with a button that saves every figure as CSV."""
    tasks = list(dict.fromkeys(task for cell in cells for task in cell.tasks))
    shape = _Shape(
        tasks,
        byte_unit(cells),
        any(cell.host_bytes for cell in cells),
        any(cell.nll is not None for cell in cells),
        looks,
    )
    rows = "".join(_row(cell, shape, timings) for cell in cells)
    fed = f" {NLL_WORDS}" if shape.fed else ""
    return f"""<section id="measurements"><h2>All measurements</h2>
<p class="muted">{sample_count(cells)} samples per task. Small figures: 95% interval
({interval_names(cells)}). {_versus_words(cells)}Recovery: score / full-cache score.{fed}
Click a heading to sort.</p>
{note(larger_cells(cells))}
{csv_button(cell_records(cells, timings or {}))}
<div class="scroll"><table id="cells"><thead><tr>{_head(shape, timings)}</tr></thead>
<tbody>{rows}</tbody></table></div></section>"""


def csv_button(records: Sequence[Mapping[str, Any]]) -> str:
    """Make a button with which the page's script saves these records as CSV."""
    return (
        f'<p><button type="button" id="csv" data-csv="{escape(csv_text(records))}">Save as CSV</button></p>'
    )


def dotted(method: str, looks: Mapping[str, MethodStyle]) -> str:
    """Write a method's name after a dot of its colour, linked to its card."""
    return f'<i class="dot" style="--c:var(--m{looks[method].number})"></i>{linked(method, looks)}'


def note(sentence: str) -> str:
    """Write a paragraph above the table; nothing without a sentence."""
    return f'<p class="note">{escape(sentence)}</p>' if sentence else ""


def _versus_words(cells: Sequence[Cell]) -> str:
    tests = tests_in_words(cells)
    return f"vs full: what a method scores more on the same samples; p: {tests}. " if tests else ""


def protocol_filter(cells: Sequence[Cell]) -> str:
    """One button per protocol, and one for all (the empty value); the first is on."""
    choices = []
    for protocol in [*dict.fromkeys(cell.protocol for cell in cells), ""]:
        checked = "" if choices else " checked"
        choices.append(
            f'<label title="{escape(PROTOCOLS.get(protocol, ""))}">'
            f'<input type="radio" name="protocol" value="{escape(protocol)}"{checked}>'
            f"<span>{escape(protocol or 'all protocols')}</span></label>"
        )
    return f'<fieldset aria-label="protocol">{"".join(choices)}</fieldset>'


def _head(shape: _Shape, timings: Timings | None) -> str:
    columns = [
        header("method", "", "ascending", "text"),
        header("protocol", "", "ascending", "text protocol"),
        header("budget", ""),
        header("kept", shape.unit[0], "ascending"),
        header("kept", "% of full", "ascending"),
        *([header("host memory", "% of full", "ascending")] if shape.far else []),
        header("read", "% per step", "ascending"),
        *(header(task, "score %") for task in shape.tasks),
        header("mean", "score %"),
        *([header("−log p", "nats", "ascending")] if shape.fed else []),
        header("vs full", "points"),
        header("p", "", "ascending"),
        header("recovery", "% of full"),
        header("worst task", "recovery %"),
        header("span kept", "%"),
    ]
    if timings is not None:
        columns += [header("prefill", "ms", "ascending"), header("decode", "tokens/s")]
    return "".join(columns)


def header(name: str, unit: str, start: str = "descending", style: str = "") -> str:
    """Make a heading that sorts; `start` is the direction of the first click, the better values on top."""
    label = f"{escape(name)}<small>{unit or '&nbsp;'}</small>"
    return f'<th scope="col" data-start="{start}" class="{style}"><button type="button">{label}</button></th>'


def _row(cell: Cell, shape: _Shape, timings: Timings | None) -> str:
    entries = [
        entry(cell.method, dotted(cell.method, shape.looks), "text"),
        entry(cell.protocol, escape(cell.protocol), "text protocol"),
        entry(cell.budget, budget_label(cell.budget)),
        entry(cell.kept_bytes, f"{cell.kept_bytes / shape.unit[1]:,.1f}"),
        entry(cell.percent, f"{cell.percent:.1f}", "size", share=cell.percent / 100),
        *([entry(cell.host_percent, f"{cell.host_percent:.1f}", "size")] if shape.far else []),
        entry(cell.read_percent, f"{cell.read_percent:.1f}", "size", share=cell.read_percent / 100),
        *(_score(cell.tasks.get(task)) for task in shape.tasks),
        _interval(cell.mean, cell.mean_low, cell.mean_high, few=cell.few),
        *([entry(cell.nll, nats(cell.nll))] if shape.fed else []),
        *versus(cell.versus),
        _recovery(cell.recovery),
        _recovery(cell.worst_recovery, f"{escape(cell.worst_task or '')} "),
        entry(cell.span_kept, "–" if cell.span_kept is None else f"{100 * cell.span_kept:.0f}"),
    ]
    if timings is not None:
        timing = timings.get((cell.method, cell.budget), {})
        for key in ("prefill_ms", "decode_tokens_per_s"):
            median, spread = speed(timing, key)
            entries.append(entry(timing.get(key), f"{median or '–'} <small>{spread}</small>"))
    group = escape(f"{cell.protocol}/{cell.method}")
    style = "reference" if cell.reference else ""
    families = escape(" ".join(families_of(cell.method)))
    opening = (
        f'<tr data-protocol="{escape(cell.protocol)}" data-group="{group}" data-families="{families}" '
        f'class="{style}">'
    )
    return f"{opening}{''.join(entries)}</tr>"


def entry(key: str | float | None, content: str, style: str = "", *, share: float | None = None) -> str:
    """Make a cell that sorts by `key` (None last), with a bar of `share` of its width under the content."""
    sort = "" if key is None else escape(str(key))
    bar = "" if share is None else f' style="--share:{min(1.0, share):.3f}"'
    return f'<td class="{style}" data-sort="{sort}"{bar}>{content}</td>'


def _score(score: MeanScore | None) -> str:
    return entry(None, "–") if score is None else _interval(score.mean, score.low, score.high, few=score.few)


def versus(found: Difference | None) -> list[str]:
    """Write the difference to the full cache with its interval, and p."""
    if found is None:
        return [entry(None, "–")] * 2
    ends = ""
    if found.low is not None and found.high is not None:
        ends = f" <small>{signed(100 * found.low)} to {signed(100 * found.high)}</small>"
    p = escape(chance(found.p))
    return [entry(found.mean, f"{signed(100 * found.mean)}{ends}"), entry(found.p, p)]


def _interval(mean: float, low: float, high: float, *, few: bool) -> str:
    ends = "n too small" if few else f"{100 * low:.0f}–{100 * high:.0f}"
    content = f"{100 * mean:.0f} <small>{ends}</small>"
    return entry(mean, content, "score", share=mean)


def _recovery(share: float | None, prefix: str = "") -> str:
    if share is None:
        return entry(None, "–")
    style = "good" if share >= 0.95 else "fair" if share >= 0.8 else "poor"
    return entry(share, f'{prefix}<b class="{style}">{100 * share:.0f}</b>')
