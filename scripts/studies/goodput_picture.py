"""The picture of goodput: what methods lose, how many bytes they keep, and requests per second by trace."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

# A colour and a marker for each system, in the order of the table.
STYLES = (
    ("#767676", "s"), ("#e69f00", "D"), ("#0072b2", "o"), ("#d55e00", "^"), ("#56b4e9", "v"), ("#009e73", "P")
)  # fmt: skip


def picture(rows: Sequence[Any], traces: Sequence[str], systems: Sequence[str]) -> bytes:
    """Draw a PNG with a line for every method: its loss beside its bytes; below, a panel of rates per trace.

    Panels are in a column, so that their text can be read on a narrow screen. rows: those of `goodput.rows`.
    """
    from matplotlib.figure import Figure

    figure = Figure((5.6, 3 * (1 + len(traces))), dpi=140, layout="constrained")
    grid = figure.add_gridspec(1 + len(traces), 2)
    loss = figure.add_subplot(grid[0, 0])
    size = figure.add_subplot(grid[0, 1], sharey=loss)
    panels = [figure.add_subplot(grid[1 + number, :]) for number in range(len(traces))]
    at = range(len(rows))
    means = [row.nats[0] for row in rows]
    out = [[row.nats[0] - row.nats[1] for row in rows], [row.nats[2] - row.nats[0] for row in rows]]
    loss.errorbar(means, at, xerr=out, fmt="o", color="black", markersize=4, elinewidth=1)
    loss.set(title="accuracy lost", xlabel="nats per token, measured")
    size.barh(at, [100 * row.share for row in rows], height=0.5, color="#999999")
    size.set(title="bytes", xlabel="% of the full cache", xlim=(0, 105))
    size.tick_params(labelleft=False)
    for axis, trace in zip(panels, traces, strict=True):
        for number, (name, (colour, marker)) in enumerate(zip(systems, STYLES, strict=True)):
            # Systems lie below each other, so that equal rates do not hide one another.
            lines = [y + 0.11 * (number - 2.5) for y in at]
            rates = [row.rates[trace, name] for row in rows]
            axis.plot(rates, lines, marker, color=colour, markersize=5, label=name)
        axis.set(title=trace, xlabel="requests per second, simulated", xlim=(0, None))
    for axis in (loss, size, *panels):
        _decorate(axis, len(rows))
    for axis in (loss, *panels):
        # A budget stands below its method, so that names leave room for the panels.
        axis.set_yticks(at, [row.method.replace("(", "\n(") for row in rows], fontsize=10)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()


def _decorate(axis: Any, lines: int) -> None:
    """Set the grid and font sizes of a panel with so many lines."""
    axis.title.set_fontsize(11)
    axis.xaxis.label.set_fontsize(10)
    axis.grid(axis="x", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    for y in range(1, lines):
        axis.axhline(y - 0.5, color="#dddddd", linewidth=0.7)
    axis.set_ylim(lines - 0.5, -0.5)
