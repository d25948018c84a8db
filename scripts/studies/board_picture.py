"""The picture of the board: every method's loss relative to the full cache at a quarter of the slots."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.studies.real_model_picture import PANELS

COLOURS = {"agnostic": "#d55e00", "aware": "#0072b2"}
BUDGET = 0.25
# Inches of a row, and of title and axis.
ROW, EDGES = 0.165, 1.4


def picture(losses: Mapping[str, Sequence[Any]]) -> bytes:
    """Draw a PNG: nats per token by which right answers are less likely than with the full cache, sorted.

    losses: by protocol, as `board.losses` returns them. Methods are sorted by loss under the first protocol.
    Methods that evict have a budget of a quarter; labels of methods that keep all slots show their bytes.
    """
    from matplotlib.figure import Figure

    shown = {p: {x.method: x for x in found if x.budget in (None, BUDGET)} for p, found in losses.items()}
    first = {name: x for found in reversed(shown.values()) for name, x in found.items()}
    names = sorted(first, key=lambda name: first[name].nats.mean)
    figure = Figure((5.2, EDGES + ROW * len(names)), dpi=140, layout="constrained")
    axis = figure.subplots()
    axis.axvline(0, color="black", linewidth=1, linestyle=":")
    for protocol, found in shown.items():
        mine = [(row, found[name].nats) for row, name in enumerate(names) if name in found]
        rows, nats = [row for row, _ in mine], [x.mean for _, x in mine]
        out = [
            [x.mean - (x.mean if x.low is None else x.low) for _, x in mine],
            [(x.mean if x.high is None else x.high) - x.mean for _, x in mine],
        ]
        axis.errorbar(
            nats, rows, xerr=out, fmt="o", markersize=4, elinewidth=1, color=COLOURS[protocol],
            label=PANELS[protocol],
        )  # fmt: skip
    axis.set_yticks(range(len(names)), [label_of(first[name]) for name in names], fontsize=8)
    axis.set(ylim=(len(names) - 0.4, -0.6))
    axis.set_xlabel("-log p of right answers above the full cache's,\nnats per token", fontsize=9)
    axis.grid(axis="x", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside upper left")
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()


def label_of(loss: Any) -> str:
    """Label a row: the method, and its bytes if it keeps all slots or much more than its budget."""
    usual = loss.budget is not None and loss.kept <= 100 * loss.budget + 2
    return loss.method if usual else f"{loss.method}, {loss.kept:.0f}%"
