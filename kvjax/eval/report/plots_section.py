"""The page's plots: quality against measured bytes, over all tasks and task by task, with one legend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from kvjax.eval.report.cells import Cell, MeanScore
from kvjax.eval.report.frontier import (
    DARK,
    LIGHT,
    SCORES,
    Axis,
    Panel,
    Point,
    byte_axis,
    leading,
    reaches,
    styles_of,
)
from kvjax.eval.report.method_cards import families_of, linked
from kvjax.eval.report.svg_plot import LARGE, SMALL, MethodStyle, marker_svg, svg_plot

TASK_SCORES = Axis("score (%)", SCORES.limits)
NLL = Axis("−log p (nats)", None, higher=False, log=True)


def looks_of(panels: Sequence[Panel], axis: Axis) -> dict[str, MethodStyle]:
    """How each method looks on every plot of a page."""
    points = [point for panel in panels for point in panel.points]
    styles = styles_of(points, LIGHT, leading(panels, axis))
    return {
        method: MethodStyle(
            number,
            _dashes(style),
            "" if style["marker"] == "none" else style["marker"],
            families_of(method),
            style["color"] == LIGHT["grid"],
        )
        for number, (method, style) in enumerate(styles.items())
    }


def _dashes(style: Mapping[str, Any]) -> str:
    line = style.get("linestyle", "-")
    if isinstance(line, str):
        return {"--": "6 3", ":": "2 2.5"}.get(line, "")
    return " ".join(f"{2 * length:g}" for length in line[1])


def colours_of(panels: Sequence[Panel], axis: Axis) -> str:
    """Write the style sheet that gives every method its colour, on a light ground and on a dark one."""
    points = [point for panel in panels for point in panel.points]
    light, dark = (
        "".join(
            f"--m{number}:{style['color'] if style['color'] != theme['grid'] else theme['muted']};"
            for number, style in enumerate(styles_of(points, theme, leading(panels, axis)).values())
        )
        for theme in (LIGHT, DARK)
    )
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


def plots(panels: Sequence[Panel], axis: Axis, of: str) -> str:
    """Make the section of the frontier; `of`: what its intervals are computed over."""
    looks, reach = looks_of(panels, axis), byte_axis(reaches(panels))
    drawn = "".join(f"<figure>{svg_plot(panel, axis, reach, looks, LARGE)}</figure>" for panel in panels)
    better = "Up" if axis.higher else "Down"
    hollow = any(point.reads_less for panel in panels for point in panel.points)
    read = "A hollow point shows the bytes one decode step reads, where that is less than a method keeps."
    return f"""<section id="frontier"><h2>Quality against measured bytes</h2>
<p class="muted">{better} and to the left is better. Bars: 95% interval of {escape(of)}.
{read if hollow else ""} <span class="pareto-sign"></span> the Pareto front: nothing that was measured
beats what is on it.</p>
<style>{colours_of(panels, axis)}</style>
<div class="plots">{drawn}</div>{_legend(looks)}</section>"""


def _legend(looks: Mapping[str, MethodStyle]) -> str:
    named = "".join(
        f'<li data-method="{look.number}" data-families="{escape(" ".join(look.families))}" '
        f'style="--c:var(--m{look.number})">{marker_svg(look)}{linked(method, looks)}</li>'
        for method, look in looks.items()
        if not look.plain
    )
    others = sum(look.plain for look in looks.values())
    note = f"<li>grey: {others} others, beaten everywhere; point at one for its name</li>" if others else ""
    return f'<ul class="legend">{named}{note}</ul>'


def task_plots(cells: Sequence[Cell], looks: Mapping[str, MethodStyle]) -> str:
    """Plot scores per protocol and task, small, and −log p where it was measured; "" for one task."""
    fed = any(cell.nll is not None for cell in cells)
    if len({task for cell in cells for task in cell.tasks}) < 2 and not fed:
        return ""
    likelihoods = (
        f"""<h3>−log p of the right answer</h3><p class="muted">In nats per token; less is better.</p>
<div class="plots small">{_small(cells, looks, NLL, _nll)}</div>"""
        if fed
        else ""
    )
    return f"""<section id="tasks"><h2>Task by task</h2>
<p class="muted">The same methods in the same colours.</p>
<div class="plots small">{_small(cells, looks, TASK_SCORES, _score)}</div>{likelihoods}</section>"""


Value = tuple[float, tuple[float, float] | None]


def _small(
    cells: Sequence[Cell],
    looks: Mapping[str, MethodStyle],
    axis: Axis,
    value: Callable[[MeanScore], Value | None],
) -> str:
    """Draw a plot per protocol and task."""
    panels: dict[tuple[str, str], list[Point]] = {}
    for cell in cells:
        for task, score in cell.tasks.items():
            if found := value(score):
                panels.setdefault((cell.protocol, task), []).append(_point(cell, *found))
    drawn = []
    for (protocol, task), points in panels.items():
        panel = Panel(f"{task} · {protocol}", "", points)
        plot = svg_plot(panel, axis, byte_axis(reaches([panel])), looks, SMALL)
        drawn.append(f'<figure data-protocol="{escape(protocol)}">{plot}</figure>')
    return "".join(drawn)


def _score(score: MeanScore) -> Value | None:
    return 100 * score.mean, None if score.few else (100 * score.low, 100 * score.high)


def _nll(score: MeanScore) -> Value | None:
    return None if score.nll is None else (score.nll, None)


def _point(cell: Cell, value: float, ends: tuple[float, float] | None) -> Point:
    return Point(cell.method, cell.percent, cell.read_percent, cell.reads_less, value, ends, cell.reference)
