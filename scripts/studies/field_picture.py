"""The picture of field.py: KL from the full cache, a panel per question, with intervals."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.eval.report.cells import bootstrap_interval
from scripts.studies.field_rows import TOPICS

TITLES = {
    "codes": "codes",
    "formats": "number formats",
    "encodings": "published encodings",
    "bits": "bits of keys and of values",
    "sinks": "first tokens kept, a quarter of the slots",
    "heads": "who chooses, a quarter of the slots",
    "windows": "SnapKV's window, a quarter (per head: 16)",
    "windows of half": "SnapKV's window, half",
}
FIRST, OTHER = "#0072b2", "#d55e00"


def picture(rows: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Draw a PNG: mean KL over windows with its 95% interval, for all topics whose rows are measured."""
    from matplotlib.figure import Figure

    shown = {topic: [n for n in names if n in rows] for topic, names in TOPICS.items()}
    shown = {topic: names for topic, names in shown.items() if len(names) > 1}
    heights = [len(names) + 1 for names in shown.values()]
    figure = Figure((5.2, 0.26 * sum(heights) + 0.9), dpi=140, layout="constrained")
    axes = np.atleast_1d(figure.subplots(len(shown), 1, sharex=True, height_ratios=heights))
    for axis, (topic, names) in zip(axes, shown.items(), strict=True):
        for at, name in enumerate(names):
            mean, low, high = spread(rows[name]["kl"])
            axis.plot([low, high], [at, at], color=FIRST if at == 0 else OTHER, linewidth=1.5)
            axis.plot(mean, at, "o", color=FIRST if at == 0 else OTHER, markersize=5)
        axis.set(yticks=range(len(names)), yticklabels=names, xscale="log", ylim=(len(names) - 0.4, -0.6))
        axis.set_title(TITLES[topic], fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
        axis.grid(axis="x", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(
        "KL from the full cache, nats per token\n(mean and 95% interval over windows)", fontsize=8
    )
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Compute the mean and its 95% interval over windows."""
    return float(np.mean(values)), *bootstrap_interval(values)
