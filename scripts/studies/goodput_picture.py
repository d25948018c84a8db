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
    """A PNG with a line for every method: its loss, its bytes, and a panel of rates for every trace.

    rows: those of `goodput.rows`.
    """
    from matplotlib.figure import Figure

    figure = Figure((11, 4.2), dpi=110, layout="constrained")
    axes = figure.subplots(1, 2 + len(traces), sharey=True, width_ratios=[1, 0.8, *[1.5] * len(traces)])
    at = range(len(rows))
    loss, size, *panels = axes
    means = [row.nats[0] for row in rows]
    out = [[row.nats[0] - row.nats[1] for row in rows], [row.nats[2] - row.nats[0] for row in rows]]
    loss.errorbar(means, at, xerr=out, fmt="o", color="black", markersize=4, elinewidth=1)
    loss.set(title="accuracy lost", xlabel="nats per token, measured")
    size.barh(at, [100 * row.share for row in rows], height=0.5, color="#999999")
    size.set(title="bytes", xlabel="% of the full cache", xlim=(0, 105))
    for axis, trace in zip(panels, traces, strict=True):
        for number, (name, (colour, marker)) in enumerate(zip(systems, STYLES, strict=True)):
            # Systems lie below each other, so that equal rates do not hide one another.
            lines = [y + 0.11 * (number - 2.5) for y in at]
            rates = [row.rates[trace, name] for row in rows]
            axis.plot(rates, lines, marker, color=colour, markersize=5, label=name)
        axis.set(title=trace, xlabel="requests per second, simulated", xlim=(0, None))
    for axis in axes:
        axis.title.set_fontsize(9)
        axis.xaxis.label.set_fontsize(8)
        axis.grid(axis="x", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        for y in at[1:]:
            axis.axhline(y - 0.5, color="#dddddd", linewidth=0.7)
    loss.set_yticks(at, [row.method for row in rows], fontsize=9)
    loss.set_ylim(len(rows) - 0.5, -0.5)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(systems), frameon=False, fontsize=8)
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()
