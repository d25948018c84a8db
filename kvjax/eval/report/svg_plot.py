"""A plot as SVG text: quality over a log axis of bytes, in colours that the page's style names.

Every method is a group of class "series" with the number of its colour and its families, so that the page's
script can show, hide and stress it on all plots alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from matplotlib.ticker import MaxNLocator

from kvjax.eval.report.frontier import Axis, Panel, Point, Reach, pareto

# The outlines of markers with radius 1, by the letters that matplotlib has for them.
_OUTLINES = {
    "s": "M-.85-.85H.85V.85H-.85Z",
    "D": "M0-1.1 1.1 0 0 1.1-1.1 0Z",
    "d": "M0-1.25.75 0 0 1.25-.75 0Z",
    "^": "M0-1.1 1.1.9H-1.1Z",
    "v": "M0 1.1 1.1-.9H-1.1Z",
    "<": "M-1.1 0 .9-1.1V1.1Z",
    ">": "M1.1 0-.9-1.1V1.1Z",
    "P": "M-.4-1.1H.4V-.4H1.1V.4H.4V1.1H-.4V.4H-1.1V-.4H-.4Z",
    "X": "M-1-.5-.5-1 0-.5.5-1 1-.5.5 0 1 .5.5 1 0 .5-.5 1-1 .5-.5 0Z",
    "p": "M0-1.1 1.05-.34.65.9H-.65L-1.05-.34Z",
    "h": "M0-1.1.95-.55V.55L0 1.1-.95.55V-.55Z",
    "*": "M0-1.5.4-.5 1.45-.45.62.2.9 1.2 0 .62-.9 1.2-.62.2-1.45-.45-.4-.5Z",
    "o": "M-1 0A1 1 0 0 1 1 0A1 1 0 0 1-1 0Z",
    ".": "M-.5 0A.5.5 0 0 1 .5 0A.5.5 0 0 1-.5 0Z",
}
_TICKS = 5
# The smallest value on a log axis, at which a likelihood of 1 is drawn.
_LEAST = 1e-4


class MethodStyle(NamedTuple):
    """How a method looks on all plots of a page: number of its colour, dashes, letter of its marker.

    families: for the page's filter. plain: grey and without a name in the legend.
    """

    number: int
    dashes: str
    marker: str
    families: tuple[str, ...]
    plain: bool


class PlotSize(NamedTuple):
    """Pixels of a plot and its left, top and bottom margins."""

    width: int
    height: int
    left: int
    top: int
    bottom: int


LARGE, SMALL = PlotSize(560, 400, 48, 44, 44), PlotSize(320, 230, 52, 26, 34)
_RIGHT = 12
Place = Callable[[float], float]


def svg_plot(panel: Panel, axis: Axis, reach: Reach, looks: Mapping[str, MethodStyle], size: PlotSize) -> str:
    """Draw a panel as an SVG element, with the line of its Pareto front.

    reach: both ends of the byte axis, and its ticks.

    >>> points = [Point("a<b", 50.0, 50.0, False, 70.0, (60.0, 80.0), False)]
    >>> axis = Axis("score", (0.0, 100.0))
    >>> look = {"a<b": MethodStyle(0, "", "o", (), False)}
    >>> "<title>a&lt;b" in svg_plot(Panel("get", "", points), axis, ((25.0, 100.0), [50.0]), look, SMALL)
    True
    """
    inside = size.width - size.left - _RIGHT, size.height - size.top - size.bottom
    low, high, ticks = _value_axis(panel.points, axis)
    x = _place(*reach[0], inside[0], log=True)
    y = _place(low, high, inside[1], log=axis.log)
    up: Place = lambda value: inside[1] - y(value)  # noqa: E731
    lines = [_grid(reach[1], ticks, x, up, inside, axis)]
    front = pareto(panel.points, axis.higher)
    lines.append(f'<polyline class="pareto" points="{_joined([(x(p.kept), up(p.value)) for p in front])}"/>')
    lines += [_series(panel, method, look, x, up, inside[0]) for method, look in looks.items()]
    # A nested svg clips everything outside of the axes.
    plot = (
        f'<svg x="{size.left}" y="{size.top}" width="{inside[0]}" height="{inside[1]}">{"".join(lines)}</svg>'
    )
    words = _words(panel, axis, reach[1], ticks, x, up, size)
    label = escape(f"{panel.title}: {axis.name} against kept bytes")
    opening = f'<svg class="plot" role="img" aria-label="{label}" viewBox="0 0 {size.width} {size.height}">'
    return f"{opening}{plot}{words}</svg>"


def marker_svg(look: MethodStyle) -> str:
    """Draw the sign of a method for legends."""
    dashes = f' stroke-dasharray="{look.dashes}"' if look.dashes else ""
    line = f'<path class="line" d="M0 7H30"{dashes}/>'
    return f'<svg class="sign" viewBox="0 0 30 14">{line}{_marker(look.marker, 15.0, 7.0)}</svg>'


def _place(low: float, high: float, pixels: int, *, log: bool) -> Place:
    of = (lambda v: math.log(max(v, _LEAST))) if log else float
    start, end = of(low), of(high)
    return lambda value: pixels * (of(value) - start) / (end - start)


def _value_axis(points: Sequence[Point], axis: Axis) -> tuple[float, float, list[float]]:
    """Return both ends of the axis of quality, and its ticks."""
    if axis.limits is not None:
        return *axis.limits, [float(tick) for tick in range(0, 101, 20)]
    values = [v for p in points for v in (p.value, *(p.ends or ()))] or [0.0]
    if axis.log:
        low = math.floor(math.log10(max(_LEAST, min(values))))
        high = max(low + 1, math.ceil(math.log10(max(_LEAST, *values))))
        return 10.0**low, 10.0**high, [10.0**power for power in range(low, high + 1)]
    ticks = [float(tick) for tick in MaxNLocator(_TICKS).tick_values(min(values), max(values))]
    return ticks[0], ticks[-1], ticks


def _grid(
    across: Sequence[float], ticks: Sequence[float], x: Place, y: Place, inside: tuple[int, int], axis: Axis
) -> str:
    lines = [f"M0 {y(tick):.1f}H{inside[0]}" for tick in ticks]
    lines += [f"M{x(tick):.1f} 0V{inside[1]}" for tick in across]
    zero = (
        f'<path class="zero" d="M0 {y(0):.1f}H{inside[0]}"/>' if axis.limits is None and not axis.log else ""
    )
    return f'<path class="grid" d="{"".join(lines)}"/>{zero}'


def _words(
    panel: Panel,
    axis: Axis,
    across: Sequence[float],
    ticks: Sequence[float],
    x: Place,
    y: Place,
    size: PlotSize,
) -> str:
    foot = size.height - size.bottom
    words = [f'<text class="title" x="{size.left}" y="16">{escape(panel.title)}</text>']
    if size.top > 40:
        words.append(f'<text x="{size.left}" y="34">{escape(panel.about)}</text>')
    for tick in ticks:
        at = y(tick) + size.top + 4
        words.append(f'<text class="end" x="{size.left - 6}" y="{at:.1f}">{tick:.4g}</text>')
    for tick in across:
        words.append(f'<text class="mid" x="{x(tick) + size.left:.1f}" y="{foot + 16}">{tick:.3g}%</text>')
    middle = (size.left + size.width - _RIGHT) / 2
    name = "bytes kept, % of the full cache (log scale)" if size.top > 40 else "bytes kept"
    words.append(f'<text class="mid" x="{middle:.0f}" y="{size.height - 6}">{name}</text>')
    place = f"translate(11 {(size.top + foot) / 2:.0f}) rotate(-90)"
    words.append(f'<text class="mid" transform="{place}">{escape(axis.name)}</text>')
    return "".join(words)


def _series(panel: Panel, method: str, look: MethodStyle, x: Place, y: Place, width: int) -> str:
    points = sorted((p for p in panel.points if p.method == method), key=lambda p: p.kept)
    if not points:
        return ""
    families = escape(" ".join(look.families))
    opening = (
        f'<g class="series{" plain" if look.plain else ""}" data-method="{look.number}" '
        f'data-families="{families}" style="--c:var(--m{look.number})">'
    )
    dashes = f' stroke-dasharray="{look.dashes}"' if look.dashes else ""
    if points[0].reference:
        line = (
            f'<path class="line" d="M0 {y(points[0].value):.1f}H{width}"{dashes}>{_title(points[0])}</path>'
        )
        return f"{opening}{line}</g>"
    drawn = []
    if len(points) > 1:
        line = _joined([(x(p.kept), y(p.value)) for p in points])
        drawn.append(
            f'<polyline class="line" points="{line}"{dashes}><title>{escape(method)}</title></polyline>'
        )
    lighter = sorted((p for p in points if p.reads_less), key=lambda p: p.read)
    if lighter:
        drawn.append(
            f'<polyline class="thin" points="{_joined([(x(p.read), y(p.value)) for p in lighter])}"/>'
        )
    for point in points:
        if point.ends is not None:
            low, high = y(point.ends[0]), y(point.ends[1])
            drawn.append(f'<path class="bar" d="M{x(point.kept):.1f} {low:.1f}V{high:.1f}"/>')
        drawn.append(_marker(look.marker, x(point.kept), y(point.value), _title(point)))
        if point.reads_less:
            drawn.append(_marker(look.marker, x(point.read), y(point.value), _title(point), hollow=True))
    return f"{opening}{''.join(drawn)}</g>"


def _title(point: Point) -> str:
    ends = "" if point.ends is None else f" ({point.ends[0]:.3g} to {point.ends[1]:.3g})"
    reads = f", {point.read:.3g}% read per step" if point.reads_less else ""
    said = f"{point.value:.3g}{ends} at {point.kept:.3g}% of the bytes{reads}"
    return f"<title>{escape(point.method)}: {said}</title>"


def _marker(letter: str, x: float, y: float, title: str = "", *, hollow: bool = False) -> str:
    outline = _OUTLINES.get(letter)
    if outline is None:
        return ""
    kind = "hollow" if hollow else "mark"
    return (
        f'<path class="{kind}" d="{outline}" transform="translate({x:.1f} {y:.1f}) scale(4.5)">{title}</path>'
    )


def _joined(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
