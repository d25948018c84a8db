"""The frontier plot: quality against the bytes that were measured, one panel per protocol."""

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvjax.eval.report.cells import Cell
from kvjax.eval.report.comparison_table import PROTOCOLS
from kvjax.files import write_atomic

# Okabe and Ito's colours, told apart with any kind of colour vision; without yellow, which is lost on white.
# Their number and the markers' share no divisor, so that colour and marker together repeat late.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
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
_ANCHORS = {"random": ":", "sink-recent": (0, (3, 1, 1, 1))}
_COLOURS_ON_DARK = ("#4FA8E8", "#F28A52", "#2CC79B", "#E5A0C8", "#F0B43C", "#A5DBFA")
Styles = Mapping[str, Mapping[str, Any]]

_LIGHT = {"paper": "#ffffff", "ink": "#1b1f24", "muted": "#6b7480", "grid": "#e3e7ec"}
_DARK = {"paper": "#161b22", "ink": "#e6edf3", "muted": "#9aa5b1", "grid": "#2a313a"}
_DOTS_PER_INCH = 160


def write_frontier(path: str | os.PathLike[str], cells: Sequence[Cell]) -> None:
    """Writes the frontier as a PNG: mean score (%) against kept bytes (% of the full cache, log axis).

    One line per method, one point per budget, bars for the 95% interval of the mean. A hollow point on a thin
    line shows the bytes one decode step reads, for methods that read less than they keep.

    >>> import pathlib, tempfile
    >>> cell = Cell("snapkv", 0.5, "aware", {}, 0.5, 0.4, 0.6, 32.0, 64.0, 32.0, None)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_frontier(pathlib.Path(folder) / "frontier.png", [cell])
    ...     (pathlib.Path(folder) / "frontier.png").read_bytes()[1:4]
    b'PNG'
    """
    write_atomic(path, frontier_png(cells))


def frontier_png(cells: Sequence[Cell], *, dark: bool = False) -> bytes:
    """The bytes of the frontier plot's PNG, on a light or a dark ground.

    >>> cell = Cell("snapkv", 0.5, "aware", {}, 0.5, 0.4, 0.6, 32.0, 64.0, 32.0, None)
    >>> frontier_png([cell])[1:4]
    b'PNG'
    """
    theme = _DARK if dark else _LIGHT
    protocols = list(dict.fromkeys(cell.protocol for cell in cells))
    panels = max(1, len(protocols))
    styles = _styles(cells, theme)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=(1.2 + 5.4 * panels, 5.6), layout=layout, facecolor=theme["paper"])
    axes = figure.subplots(1, panels, sharey=True, sharex=True, squeeze=False)[0]
    for axis, protocol in zip(axes, protocols, strict=False):
        _panel(axis, [cell for cell in cells if cell.protocol == protocol], styles, theme)
    axes[0].set_ylabel("mean score over tasks (%)", color=theme["ink"])
    _legend(figure, cells, styles, theme, columns=min(6, 3 * panels))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH)
    return buffer.getvalue()


def _styles(cells: Sequence[Cell], theme: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Line styles by method; reference and anchors in ink and grey, so that colour is left to contenders."""
    styles: dict[str, dict[str, Any]] = {}
    colours = _COLOURS_ON_DARK if theme is _DARK else _COLOURS
    references = {cell.method for cell in cells if cell.reference}
    contenders = 0
    for method in dict.fromkeys(cell.method for cell in cells):
        if method in references:
            style = {"color": theme["ink"], "linestyle": "--", "linewidth": 1.4, "marker": "none"}
        elif method in _ANCHORS:
            style = {"color": theme["muted"], "linestyle": _ANCHORS[method], "linewidth": 1.6, "marker": "."}
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
    figure: Figure, cells: Sequence[Cell], styles: Styles, theme: Mapping[str, str], *, columns: int
) -> None:
    handles, labels = [], []
    for method, style in styles.items():
        points = {repr(cell.budget) for cell in cells if cell.method == method}
        single = len(points) == 1 and style["marker"] != "none"
        handles.append(Line2D([], [], **{**style, **({"linestyle": "none"} if single else {})}))
        labels.append(method)
    if any(cell.reads_less for cell in cells):
        hollow = {"marker": "o", "markerfacecolor": theme["paper"], "linewidth": 0.9, "markersize": 7}
        handles.append(Line2D([], [], color=theme["muted"], **hollow))
        labels.append("hollow: bytes read per step")
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=3.2)
    legend.set_frame_on(False)
    for text in legend.get_texts():
        text.set_color(theme["ink"])


def _panel(axis: Axes, cells: Sequence[Cell], styles: Styles, theme: Mapping[str, str]) -> None:
    for method, style in styles.items():
        points = sorted((cell for cell in cells if cell.method == method), key=lambda cell: cell.percent)
        if any(cell.reference for cell in points):
            axis.axhline(
                100 * points[0].mean, color=style["color"], linestyle="--", linewidth=style["linewidth"]
            )
            continue
        _line(axis, points, [cell.percent for cell in points], style)
        lighter = [cell for cell in points if cell.reads_less]
        lighter.sort(key=lambda cell: cell.read_percent)
        hollow = {"markerfacecolor": theme["paper"], "markeredgecolor": style["color"], "linewidth": 0.9}
        _line(
            axis,
            lighter,
            [cell.read_percent for cell in lighter],
            {**style, **hollow, "markeredgewidth": 1.4},
        )
    _dress(axis, cells, theme)


def _line(axis: Axes, cells: Sequence[Cell], percents: Sequence[float], style: Mapping[str, Any]) -> None:
    if not cells:
        return
    means = [100 * cell.mean for cell in cells]
    below = [100 * (cell.mean - cell.mean_low) for cell in cells]
    above = [100 * (cell.mean_high - cell.mean) for cell in cells]
    bars = {"ecolor": style["color"], "elinewidth": 0.7, "fmt": "none", "alpha": 0.45}
    axis.errorbar(percents, means, yerr=[below, above], **bars)
    axis.plot(percents, means, zorder=3, **style)


def _dress(axis: Axes, cells: Sequence[Cell], theme: Mapping[str, str]) -> None:
    protocol = cells[0].protocol
    axis.set_title(protocol, loc="left", fontweight="bold", color=theme["ink"], pad=20)
    axis.text(
        0, 1.02, PROTOCOLS.get(protocol, ""), transform=axis.transAxes, color=theme["muted"], fontsize=9
    )
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator([100 / 2**i for i in range(-2, 10)]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}%"))
    axis.set_xlabel("bytes kept, measured (% of the full cache)", color=theme["ink"])
    axis.set_ylim(-2, 103)
    axis.set_facecolor(theme["paper"])
    axis.grid(True, color=theme["grid"], linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=theme["muted"], length=0, labelsize=9)
    for side in ("top", "right", "left", "bottom"):
        axis.spines[side].set_visible(side == "bottom")
        axis.spines[side].set_color(theme["muted"])
