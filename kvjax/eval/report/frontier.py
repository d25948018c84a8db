"""The frontier plot: quality against the bytes that were measured, one panel per protocol or for a text."""

import io
import math
import os
import textwrap
import warnings
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvjax.base.atomic_files import write_atomic
from kvjax.eval.report.cells import Cell
from kvjax.eval.report.comparison_table import PROTOCOLS

# Okabe and Ito's colours, which are distinguishable with any kind of colour vision, without yellow, which is
# invisible on white; then as many darker ones. Their number and the markers' are coprime, so that
# combinations repeat late.
_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#332288", "#882255", "#7A8B00", "#8C564B", "#9467BD", "#2F5F5F"),
)
_MARKERS = {
    "o": 7.0,
    "s": 6.5,
    "D": 6.0,
    "^": 7.5,
    "v": 7.5,
    "P": 8.0,
    "X": 8.0,
    "<": 7.5,
    ">": 7.5,
    "p": 8.0,
    "*": 11.0,
}
_LINES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)))
# Lines and markers; single points have no lines to tell them apart.
_ANCHORS = {"random": (":", "h"), "sink-recent": ((0, (3, 1, 1, 1)), "d")}
_COLOURS_ON_DARK = (
    *("#4FA8E8", "#F28A52", "#2CC79B", "#E5A0C8", "#F0B43C", "#A5DBFA"),
    *("#9D8DF1", "#E0708F", "#C3D34A", "#C9A08C", "#C39BE8", "#8FC4C0"),
)
Styles = Mapping[str, Mapping[str, Any]]
# Both ends of the byte axis, and its ticks.
Reach = tuple[tuple[float, float], list[float]]

LIGHT = {"paper": "#ffffff", "ink": "#1b1f24", "muted": "#6b7480", "grid": "#e3e7ec"}
DARK = {"paper": "#161b22", "ink": "#e6edf3", "muted": "#9aa5b1", "grid": "#2a313a"}
_DOTS_PER_INCH = 160


# Fewer ticks than this do not show an axis' scale.
_TICKS = 3
_CAPTION_COLUMNS = 90
# With more methods than this, only the leading ones have colours, and all others are grey.
_MANY = 24


class Point(NamedTuple):
    """A method at a budget: bytes kept and read (% of the full cache), and quality with its interval.

    ends: None if there are too few samples for an interval. reads_less: whether `read` is shown as a point of
    its own.
    """

    method: str
    kept: float
    read: float
    reads_less: bool
    value: float
    ends: tuple[float, float] | None
    reference: bool


class Panel(NamedTuple):
    """Points that share a picture: its title, a sentence about it."""

    title: str
    about: str
    points: Sequence[Point]


class Axis(NamedTuple):
    """The quality axis: its name, its ends where they are known, and whether more is better.

    log: whether the axis is logarithmic.
    """

    name: str
    limits: tuple[float, float] | None
    higher: bool = True
    log: bool = False


SCORES = Axis("mean score over tasks (%)", (-2.0, 103.0))


def panels_of(cells: Sequence[Cell]) -> list[Panel]:
    """One panel per protocol."""
    protocols = dict.fromkeys(cell.protocol for cell in cells)
    return [Panel(p, PROTOCOLS.get(p, ""), [_point(c) for c in cells if c.protocol == p]) for p in protocols]


def _point(cell: Cell) -> Point:
    ends = None if cell.few else (100 * cell.mean_low, 100 * cell.mean_high)
    value, read = 100 * cell.mean, cell.read_percent
    return Point(cell.method, cell.percent, read, cell.reads_less, value, ends, cell.reference)


def write_frontier(
    path: str | os.PathLike[str], panels: Sequence[Panel], axis: Axis = SCORES, caption: str = ""
) -> None:
    """Write the frontier as a PNG: quality against kept bytes (% of the full cache, log scale).

    One line per method, one point per budget, bars for 95% intervals. A hollow point on a thin line shows the
    bytes one decode step reads, for methods that read less than they keep. A broad pale line joins the Pareto
    front: the points that none beats. If there are very many methods, those that are beaten everywhere are
    grey and have no name. The caption is below.

    >>> import pathlib, tempfile
    >>> cell = Cell("snapkv", 0.5, "aware", {}, 0.5, 0.4, 0.6, 32.0, 64.0, 32.0, None)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_frontier(pathlib.Path(folder) / "frontier.png", panels_of([cell]))
    ...     (pathlib.Path(folder) / "frontier.png").read_bytes()[1:4]
    b'PNG'
    """
    write_atomic(path, frontier_png(panels, axis, caption))


def frontier_png(
    panels: Sequence[Panel], axis: Axis = SCORES, caption: str = "", *, dark: bool = False
) -> bytes:
    """Draw the frontier plot as a PNG, on a light or a dark ground, and return its bytes.

    >>> cell = Cell("snapkv", 0.5, "aware", {}, 0.5, 0.4, 0.6, 32.0, 64.0, 32.0, None)
    >>> frontier_png(panels_of([cell]))[1:4]
    b'PNG'
    """
    theme = theme_of(dark)
    count = max(1, len(panels))
    points = [point for panel in panels for point in panel.points]
    styles = styles_of(points, theme, leading(panels, axis))
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    below = [
        line for words in caption.splitlines() for line in textwrap.wrap(words, _CAPTION_COLUMNS * count)
    ]
    heights = 5.6, 0.17 * len(below) + 0.1
    size = 1.2 + 5.4 * count, sum(heights)
    figure = Figure(figsize=size, layout=layout, facecolor=theme["paper"])
    picture, foot = figure.subfigures(2, 1, height_ratios=heights, squeeze=False)[:, 0]
    for part in (picture, foot):
        part.set_facecolor(theme["paper"])
    axes = picture.subplots(1, count, sharey=True, sharex=True, squeeze=False)[0]
    for one, panel in zip(axes, panels, strict=False):
        _front(one, pareto(panel.points, axis.higher), theme)
        _panel(one, panel, styles, theme)
        _dress(one, panel, axis, byte_axis(reaches(panels)), theme)
    axes[0].set_ylabel(axis.name, color=theme["ink"])
    _legend(picture, points, styles, theme, columns=min(6, 3 * count))
    foot.text(0.02, 1, "\n".join(below), va="top", fontsize=8, linespacing=1.4, color=theme["muted"])
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes; the page has it in full.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH)
    return buffer.getvalue()


def theme_of(dark: bool) -> Mapping[str, str]:
    """Return the colours of a picture on a dark or a light ground: paper, ink, muted, grid."""
    return DARK if dark else LIGHT


def reaches(panels: Sequence[Panel]) -> list[float]:
    """Return the percents of bytes that a byte axis must hold: those of all points but the full cache's."""
    contenders = [point for panel in panels for point in panel.points if not point.reference]
    return [x for p in contenders for x in ((p.kept, p.read) if p.reads_less else (p.kept,))]


def pareto(points: Sequence[Point], higher: bool = True) -> list[Point]:
    """Find the points that none beats, by rising bytes: none is as good for fewer, or better for as few.

    higher: whether more quality is better.

    >>> places = dict(a=(1, 5), b=(2, 7), c=(2, 5))
    >>> points = [Point(m, kept, 50, False, value, None, False) for m, (kept, value) in places.items()]
    >>> [p.method for p in pareto(points)], [p.method for p in pareto(points, higher=False)]
    (['a', 'b'], ['a'])
    """
    gain = 1 if higher else -1

    def beats(a: Point, b: Point) -> bool:
        good, other = gain * a.value, gain * b.value
        return a.kept <= b.kept and good >= other and (a.kept, good) != (b.kept, other)

    return sorted((p for p in points if not any(beats(q, p) for q in points)), key=lambda p: p.kept)


def leading(panels: Sequence[Panel], axis: Axis = SCORES) -> Set[str]:
    """Find the methods that have a point on the Pareto front of a panel."""
    return {point.method for panel in panels for point in pareto(panel.points, axis.higher)}


def styles_of(
    points: Sequence[Point], theme: Mapping[str, str], lead: Set[str] = frozenset()
) -> dict[str, dict[str, Any]]:
    """Line styles by method; reference and anchors in ink and grey, so that colour is left to contenders.

    lead: of very many methods, those that have a colour.
    """
    styles: dict[str, dict[str, Any]] = {}
    colours = _COLOURS_ON_DARK if theme is DARK else _COLOURS
    references = {point.method for point in points if point.reference}
    contenders, methods = 0, list(dict.fromkeys(point.method for point in points))
    for method in methods:
        if len(methods) > _MANY and method not in lead | references | _ANCHORS.keys():
            styles[method] = {"color": theme["grid"], "linewidth": 1.0, "marker": ".", "zorder": 1}
            continue
        if method in references:
            style = {"color": theme["ink"], "linestyle": "--", "linewidth": 1.4, "marker": "none"}
        elif method in _ANCHORS:
            line, marker = _ANCHORS[method]
            style = {"color": theme["muted"], "linestyle": line, "linewidth": 1.6, "marker": marker}
        else:
            marker = list(_MARKERS)[contenders % len(_MARKERS)]
            style = {
                "color": colours[contenders % len(colours)],
                "linestyle": _LINES[contenders // len(colours) % len(_LINES)],
                "linewidth": 1.8,
                "marker": marker,
                "markersize": _MARKERS[marker],
            }
            contenders += 1
        styles[method] = {"markersize": 7, "markeredgecolor": theme["paper"], "markeredgewidth": 0.8, **style}
    return styles


def _legend(
    figure: SubFigure, points: Sequence[Point], styles: Styles, theme: Mapping[str, str], *, columns: int
) -> None:
    handles, labels, others = [], [], [style for style in styles.values() if style["color"] == theme["grid"]]
    for method, style in styles.items():
        if style["color"] == theme["grid"]:
            continue
        places = {point.kept for point in points if point.method == method}
        single = len(places) == 1 and style["marker"] != "none"
        handles.append(Line2D([], [], **{**style, **({"linestyle": "none"} if single else {})}))
        labels.append(method)
    if others:
        handles.append(Line2D([], [], **others[0]))
        labels.append(f"{len(others)} others, beaten everywhere")
    handles.append(Line2D([], [], color=theme["muted"], linewidth=7, alpha=0.25))
    labels.append("Pareto front")
    if any(point.reads_less for point in points):
        hollow = {"marker": "o", "markerfacecolor": theme["paper"], "linewidth": 0.9, "markersize": 7}
        handles.append(Line2D([], [], color=theme["muted"], **hollow))
        labels.append("hollow: bytes read per step")
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=3.2)
    legend.set_frame_on(False)
    for text in legend.get_texts():
        text.set_color(theme["ink"])


def _panel(axes: Axes, panel: Panel, styles: Styles, theme: Mapping[str, str]) -> None:
    for method, style in styles.items():
        points = sorted((p for p in panel.points if p.method == method), key=lambda p: p.kept)
        if any(point.reference for point in points):
            axes.axhline(points[0].value, color=style["color"], linestyle="--", linewidth=style["linewidth"])
            continue
        _line(axes, points, [point.kept for point in points], style)
        lighter = sorted((point for point in points if point.reads_less), key=lambda p: p.read)
        hollow = {"markerfacecolor": theme["paper"], "markeredgecolor": style["color"], "linewidth": 0.9}
        _line(axes, lighter, [point.read for point in lighter], {**style, **hollow, "markeredgewidth": 1.4})


def _front(axes: Axes, front: Sequence[Point], theme: Mapping[str, str]) -> None:
    """Draw the line of the Pareto front, broad and pale below all others."""
    values = [point.value for point in front]
    broad = {"color": theme["muted"], "linewidth": 7, "alpha": 0.25, "zorder": 0.5}
    axes.plot([point.kept for point in front], values, solid_capstyle="round", **broad)


def _line(axes: Axes, points: Sequence[Point], percents: Sequence[float], style: Mapping[str, Any]) -> None:
    if not points:
        return
    values = [point.value for point in points]
    ends = [point.ends or (point.value, point.value) for point in points]
    below = [value - low for value, (low, _) in zip(values, ends, strict=True)]
    above = [high - value for value, (_, high) in zip(values, ends, strict=True)]
    bars = {"ecolor": style["color"], "elinewidth": 0.7, "fmt": "none", "alpha": 0.45, "zorder": 1}
    axes.errorbar(percents, values, yerr=[below, above], **bars)
    axes.plot(percents, values, **{"zorder": 3, **style})


def byte_axis(percents: Sequence[float]) -> Reach:
    """Return both ends of a log axis around these percents, and its ticks: halves, or more if few would fit.

    >>> byte_axis([12.5, 25.0, 50.0, 100.0])[1], byte_axis([25.0, 28.0])[1]
    ([12.5, 25.0, 50.0, 100.0], [20.0, 25.0, 30.0, 35.0])
    """
    least, most = min(percents, default=25.0), max(percents, default=100.0)
    # The axis spans at least a factor of 2: methods of nearly equal bytes lie close together, budgets do not.
    room = max(1.12, math.sqrt(2 * least / most))
    low, high = least / room, most * room
    halves = [100 / 2**i for i in range(9, -3, -1)]
    tens = [10.0**i for i in range(-2, 3)]
    finer = (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)
    inside: list[float] = []
    for ticks in (halves, *([x * ten for ten in tens for x in steps] for steps in finer)):
        inside = [x for x in ticks if low <= x <= high]
        if len(inside) >= _TICKS:
            break
    return (low, high), inside


def _dress(axes: Axes, panel: Panel, axis: Axis, reach: Reach, theme: Mapping[str, str]) -> None:
    axes.set_title(panel.title, loc="left", fontweight="bold", color=theme["ink"], pad=20)
    axes.text(0, 1.02, panel.about, transform=axes.transAxes, color=theme["muted"], fontsize=9)
    axes.set_xscale("log", base=2)
    limits, ticks = reach
    axes.set_xlim(limits)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}%"))
    axes.set_xlabel("bytes kept, measured (% of the full cache, log scale)", color=theme["ink"])
    if axis.limits is not None:
        axes.set_ylim(axis.limits)
    axes.set_facecolor(theme["paper"])
    axes.grid(True, color=theme["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme["muted"], length=0, labelsize=9)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side == "bottom")
        axes.spines[side].set_color(theme["muted"])
