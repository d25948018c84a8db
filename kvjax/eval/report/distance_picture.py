"""The picture of a text by distance: the effect of methods soon after a compression, and later."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from kvjax.eval.report.cells import budget_label
from kvjax.eval.report.frontier import leading, styles_of, theme_of
from kvjax.eval.report.paired import FEW
from kvjax.eval.report.text_table import LOST, text_panels

# The curves: the name in a summary, the title, the factor, and the scale of the axis.
PLOTS = (
    ("kl", "KL(full || method), nats", 1.0, "log"),
    ("delta_nll", "nats per token more than the full cache", 1.0, "linear"),
    ("top1", "same top token (%)", 100.0, "linear"),
)


def distance_section(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the section of a report: three curves over the distance, and the table of KL; "" without data.

    rows: from `summarise_text`.
    """
    rows = [row for row in rows if row.get("distances") and row["method"] != "full"]
    if not rows:
        return ""
    light, dark = (base64.b64encode(distance_png(rows, dark=dark)).decode("ascii") for dark in (False, True))
    heads = "".join(f"<th>{_name(one)}</th>" for one in rows[0]["distances"])
    bars = " Bars and small figures: 95% interval over windows." if rows[0]["windows"] >= FEW else ""
    return f"""<section><h2>By the distance from the compression</h2>
<p class="muted">Distance: tokens read since the context was compressed. KL, loss and top token are those of
the next token, against the full cache's.{bars}</p>
<picture><source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">
<img src="data:image/png;base64,{light}" alt="Curves over the distance; the table holds the numbers of KL">
</picture>
<div class="scroll"><table><thead><tr><th class="text">KL by distance</th><th>budget</th>{heads}</tr></thead>
<tbody>{"".join(map(_row, rows))}</tbody></table></div></section>"""


def _name(piece: Mapping[str, Any]) -> str:
    return f"{piece['first']:.0f}–{piece['last']:.0f}"


def _row(row: Mapping[str, Any]) -> str:
    cells = []
    for one in row["distances"]:
        ends = f" <small>{one['kl_low']:.1e} to {one['kl_high']:.1e}</small>" if row["windows"] >= FEW else ""
        cells.append(f"<td>{one['kl']:.1e}{ends}</td>")
    name, budget = escape(row["method"]), escape(budget_label(row["budget"]))
    return f'<tr><td class="text">{name}</td><td>{budget}</td>{"".join(cells)}</tr>'


def distance_png(rows: Sequence[Mapping[str, Any]], *, dark: bool = False) -> bytes:
    """Draw the three curves as a PNG: a colour for each method, a fainter line for each smaller budget."""
    theme, panels = theme_of(dark), text_panels(rows)
    styles = styles_of(panels[0].points, theme, leading(panels, LOST))
    figure = Figure(figsize=(12.6, 4.4), layout="constrained", facecolor=theme["paper"])
    for axes, (name, title, factor, scale) in zip(figure.subplots(1, 3), PLOTS, strict=True):
        for row in rows:
            _curve(axes, row, name, factor, styles[row["method"]], _strength(row, rows))
        _dress(axes, rows[0]["distances"], title, scale, theme)
    handles, labels = axes.get_legend_handles_labels()
    shown = [i for i, row in enumerate(rows) if styles[row["method"]]["color"] != theme["grid"]][:24]
    legend = figure.legend(
        [handles[i] for i in shown], [labels[i] for i in shown], loc="outside lower center", ncols=4,
        frameon=False,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_color(theme["ink"])
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()


def _strength(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the opacity of a line: 1 for a method's largest cache, less for smaller ones."""
    kept = sorted({one["kept_bytes"] for one in rows if one["method"] == row["method"]}, reverse=True)
    return max(0.35, 1.0 - 0.3 * kept.index(row["kept_bytes"]))


def _curve(
    axes: Axes, row: Mapping[str, Any], name: str, factor: float, style: Mapping[str, Any], alpha: float
) -> None:
    pieces = row["distances"]
    values = [factor * one[name] for one in pieces]
    label = row["method"] if row["budget"] is None else f"{row['method']} {budget_label(row['budget'])}"
    axes.plot(range(len(pieces)), values, **{**style, "alpha": alpha, "label": label})
    if row["windows"] >= FEW:
        ends = [[factor * one[f"{name}_{end}"] for one in pieces] for end in ("low", "high")]
        away = [[abs(value - end) for value, end in zip(values, some, strict=True)] for some in ends]
        bars = {"ecolor": style["color"], "elinewidth": 0.7, "fmt": "none", "alpha": 0.45 * alpha}
        axes.errorbar(range(len(pieces)), values, yerr=away, **bars)


def _dress(
    axes: Axes, pieces: Sequence[Mapping[str, Any]], title: str, scale: str, theme: Mapping[str, str]
) -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=theme["ink"])
    if scale == "log":
        axes.set_yscale("log", nonpositive="mask")
    axes.xaxis.set_major_locator(FixedLocator(list(range(len(pieces)))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([_name(one) for one in pieces])
    axes.set_xlabel("tokens since the compression", color=theme["ink"])
    axes.set_facecolor(theme["paper"])
    axes.grid(True, color=theme["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=theme["muted"], length=0, labelsize=9)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side == "bottom")
        axes.spines[side].set_color(theme["muted"])
