"""The leaderboard's picture: a small panel per family, its methods in colour over all others in grey."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvjax.eval.report.frontier import byte_axis
from kvjax.eval.report.leaderboard import Line

COLUMNS = 4
# Reference methods that are shown in every panel.
ANCHORS = {"random": ":", "sink-recent": "--"}
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F5A2E")
_MARKERS = "osD^vPX"
_INK, _MUTED, _GRID, _OTHERS = "#1b1f24", "#6b7480", "#e3e7ec", "#d4d9df"


def picture(lines: Sequence[Line], families: Mapping[str, Sequence[str]], form: str = "svg") -> bytes:
    """Draw the picture: scores against measured bytes, one panel per family."""
    shown = {family: list(names) for family, names in families.items() if family != "baseline"}
    rows = math.ceil(len(shown) / COLUMNS)
    most = max(map(len, shown.values()))
    below = 0.16 * math.ceil(most / 3)
    figure = Figure(figsize=(4.1 * COLUMNS, rows * (3.0 + below) + 0.4), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.1)  # type: ignore[union-attr]
    axes = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
    read = [line.read_percent for line in lines if _reads_less(line)]
    reach, ticks = byte_axis([*(line.percent for line in lines), *read])
    for at, (one, (family, names)) in enumerate(zip(axes.flat, shown.items(), strict=False)):
        _panel(one, lines, names)
        one.set_title(family, loc="left", fontsize=10, fontweight="bold", color=_INK)
        one.set_xscale("log", base=2)
        one.set_xlim(reach)
        one.set_xticks(ticks, [f"{x:.3g}%" for x in ticks])
        one.set_xticks([], minor=True)
        one.set_ylim(-3, 103)
        one.tick_params(colors=_MUTED, length=0, labelsize=8, labelbottom=True, labelleft=True)
        one.grid(True, color=_GRID, linewidth=0.7)
        one.set_axisbelow(True)
        for side in ("top", "right", "left"):
            one.spines[side].set_visible(False)
        if at % COLUMNS == 0:
            one.set_ylabel("mean score (%)", fontsize=8, color=_INK)
        one.set_xlabel("bytes kept, measured (log)", fontsize=8, color=_INK)
    for one in axes.flat[len(shown) :]:
        one.set_visible(False)
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "leaderboard", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=form, dpi=110, metadata={"Date": None} if form == "svg" else None)
    text = buffer.getvalue()
    return b"\n".join(line.rstrip() for line in text.split(b"\n")) if form == "svg" else text


def _panel(axes: Axes, lines: Sequence[Line], names: Sequence[str]) -> None:
    """Draw the panel of one family, over all other methods in grey."""
    others = dict.fromkeys(line.method for line in lines if line.method not in (*names, "full", *ANCHORS))
    curves = [_places(lines, method) for method in others]
    # One path for all lines, with gaps between them: a path for each would make a large file.
    gap = [math.nan]
    ends = ([x for curve in curves for x in (*curve[i], *gap)] for i in (0, 1))
    axes.plot(*ends, color=_OTHERS, linewidth=0.6, zorder=1)
    single = [(xs[0], ys[0]) for xs, ys in curves if len(xs) == 1]
    if single:
        axes.plot(
            *zip(*single, strict=True), marker=".", markersize=3, color=_OTHERS, linestyle="none", zorder=1
        )
    for method, style in ANCHORS.items():
        if method not in names:
            axes.plot(*_places(lines, method), linestyle=style, color=_MUTED, linewidth=1.2, zorder=2)
    full = [line.mean for line in lines if line.method == "full"]
    if full:
        axes.axhline(100 * full[0], color=_INK, linewidth=0.9, zorder=1)
    handles = []
    for i, name in enumerate(names):
        xs, ys = _places(lines, name)
        style = {
            "color": _COLOURS[i % len(_COLOURS)],
            "marker": _MARKERS[i // len(_COLOURS) % len(_MARKERS)],
            "markersize": 4.5,
            "linewidth": 1.3,
            "markeredgecolor": "white",
            "markeredgewidth": 0.4,
        }
        axes.plot(xs, ys, zorder=4, **style)
        lighter = sorted((x.read_percent, 100 * x.mean) for x in lines if x.method == name and _reads_less(x))
        if lighter:
            hollow = style | {"markerfacecolor": "white", "markeredgecolor": style["color"], "linewidth": 0.8}
            axes.plot(*zip(*lighter, strict=True), zorder=3, **(hollow | {"markeredgewidth": 1.0}))
        _bars(axes, [line for line in lines if line.method == name], style["color"])
        handles.append(Line2D([], [], **style, label=name))
    handles += [Line2D([], [], color=_MUTED, linestyle=s, linewidth=1.2, label=n) for n, s in ANCHORS.items()]
    handles.append(Line2D([], [], color=_INK, linewidth=0.9, label="full cache"))
    if any(_reads_less(line) for line in lines if line.method in names):
        hollow = dict(marker="o", markersize=4.5, markerfacecolor="white", color=_MUTED, linewidth=0.8)
        handles.append(Line2D([], [], label="hollow: read by a step", **hollow))
    legend = axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize=6.6,
        frameon=False, handlelength=1.6, columnspacing=0.8, labelspacing=0.25,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_color(_INK)


def _reads_less(line: Line) -> bool:
    """Whether a step reads clearly fewer bytes than are kept."""
    return line.read_percent <= 0.95 * line.percent


def _places(lines: Sequence[Line], method: str) -> tuple[list[float], list[float]]:
    mine = sorted((line for line in lines if line.method == method), key=lambda line: line.percent)
    return [line.percent for line in mine], [100 * line.mean for line in mine]


def _bars(axes: Axes, lines: Sequence[Line], colour: str) -> None:
    """Draw 95% intervals, if there are enough samples."""
    wide = [line for line in lines if not line.few]
    ends = [[100 * x for x in xs] for xs in ([line.low for line in wide], [line.high for line in wide])]
    axes.vlines([line.percent for line in wide], *ends, colors=colour, linewidths=0.6, alpha=0.5)
