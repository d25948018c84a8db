"""The picture of the real model: how likely right answers are against the bytes kept, a line per method."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

Line = dict[str, Any]
PANELS = {
    "agnostic": "the question comes after compression",
    "aware": "the question is read before it",
}
COLOURS = {"kvzip": "#0072b2", "tova": "#009e73", "h2o": "#e69f00", "snapkv": "#d55e00", "random": "#767676"}
LABELS = {"kvzip": "KVzip", "tova": "TOVA", "h2o": "H2O", "snapkv": "SnapKV", "random": "random"}


def picture(lines: Sequence[Line]) -> bytes:
    """Draw a PNG: -log p of the right answer, mean over tasks, by bytes in percent of the full cache.

    Panels are in a column, so that their text can be read on a narrow screen.
    """
    from matplotlib.figure import Figure

    figure = Figure((5.6, 6), dpi=140, layout="constrained")
    axes = figure.subplots(len(PANELS), 1, sharex=True, sharey=True)
    for axis, (protocol, title) in zip(axes, PANELS.items(), strict=True):
        mine = [line for line in lines if line["protocol"] == protocol]
        (full,) = points(mine, "full")
        axis.axhline(full[1], color="black", linewidth=1, linestyle=":")
        axis.annotate("full cache", (24, full[1]), (0, 3), textcoords="offset points", fontsize=8)
        for method, colour in COLOURS.items():
            kept, nll = zip(*[*points(mine, method), full], strict=True)
            axis.plot(kept, nll, color=colour, marker="o", markersize=4, label=LABELS[method])
        axis.set(title=title, ylabel="-log p, nats per token", xlim=(20, 103))
        axis.title.set_fontsize(10)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("bytes kept, % of the full cache")
    axes[0].legend(frameon=False, fontsize=9)
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()


def points(lines: Sequence[Line], method: str) -> list[tuple[float, float]]:
    """(bytes in percent, -log p) of a method, smaller caches first, each a mean over tasks."""
    mine = [line for line in lines if line["method"] == method]
    found = []
    for budget in {line["budget"] for line in mine}:
        cell = [line for line in mine if line["budget"] == budget]
        kept = 100 * np.mean([line["kept"] for line in cell])
        found.append((float(kept), float(np.mean([np.mean(line["nll"]) for line in cell]))))
    return sorted(found)
