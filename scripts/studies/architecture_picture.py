"""The picture of architecture_table.py: quality against bytes of state, a dot per architecture."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from kvjax.base.atomic_files import write_atomic

# Possible places of a name beside its dot: to the right, a little or much higher or lower, or to the left.
PLACES = (
    ("left", 4, 3),
    ("left", 4, -9),
    ("right", -4, 3),
    ("right", -4, -9),
    ("left", 4, 11),
    ("left", 4, -17),
)


def draw(found: dict[str, Any], path: Path) -> None:
    """Plot held-out bits per byte against bytes at 8k tokens, for rows trained on the most bytes."""
    rows = [row for row in found["rows"].values() if "bits_per_byte" in row]
    most = max((row["tokens"] for row in rows), default=0)
    dots = {
        row["name"]: (row["state_bytes"]["8192"], row["bits_per_byte"])
        for row in rows
        if row["tokens"] == most
    }
    if not dots:
        return
    figure = Figure(figsize=(7.5, 5.0), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*dots.values(), strict=True), "o", color="#0072B2")
    axes.set_xscale("log", base=2)
    # Most names stand to the right of their dots.
    axes.set_xlim(right=10 * max(x for x, _ in dots.values()))
    axes.set_xlabel("bytes of state behind 8192 tokens")
    axes.set_ylabel("bits per byte of held-out text")
    axes.grid(alpha=0.3)
    figure.draw_without_rendering()  # axes no longer move from here on
    write_names(axes, dots)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    write_atomic(path, file.getvalue())


def write_names(axes: Any, dots: Mapping[str, tuple[float, float]]) -> list[Any]:
    """Write each name at the first place where it overlaps no dot and no earlier name."""
    centres = {name: axes.transData.transform(dot) for name, dot in dots.items()}
    written: list[Any] = []
    for name, dot in dots.items():
        taken = [Bbox([at - 4, at + 4]) for other, at in centres.items() if other != name]
        taken += [text.get_window_extent() for text in written]
        for side, *offset in (*PLACES, PLACES[0]):
            text = axes.annotate(name, dot, offset, textcoords="offset points", ha=side, fontsize=7)
            text.set_in_layout(False)
            if text.get_window_extent().count_overlaps(taken) == 0:
                break
            text.remove()
        else:
            axes.add_artist(text)
        written.append(text)
    return written
