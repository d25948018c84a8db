"""A picture of what fits: the most rows at every context, one line per method."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvjax.base.atomic_files import write_named
from kvjax.plan.planning import Planner

# Contexts at which rows are counted, in tokens: 8k to 4M.
CONTEXTS = tuple(2**n for n in range(13, 23))
# Okabe and Ito's colours, which are distinguishable for all kinds of colour vision.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = "osD^vPX"
# (context, rows) where at least one row fits.
Curve = Sequence[tuple[int, int]]


def curve(planner: Planner, contexts: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Compute the most rows that fit at every context, on the planner's mesh; empty if memory is not known.

    contexts: 8k to 4M unless given.
    """
    search = planner.search()
    if search is None:
        return []
    found = [(context, search.rows(context)) for context in contexts or CONTEXTS]
    return [(context, rows) for context, rows in found if rows]


def write_picture(
    path: str | os.PathLike[str],
    curves: Mapping[str, Curve],
    title: str,
    asked: tuple[int, int],
    caption: str,
) -> None:
    """Write the curves, by the methods' names, as a PNG. asked: (context, rows) to mark.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "plan.png"
    ...     write_picture(path, {"full": [(8192, 64), (16384, 32)]}, "a model", (8192, 8), "")
    ...     path.read_bytes()[1:4]
    b'PNG'
    """
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for i, (name, points) in enumerate(curves.items()):
        contexts, rows = zip(*points, strict=True) if points else ((), ())
        style: dict[str, Any] = {"color": _COLOURS[i % len(_COLOURS)], "marker": _MARKERS[i % len(_MARKERS)]}
        axes.plot(
            contexts, rows, markersize=5.5, label=name if points else f"{name}: not one row fits", **style
        )
    axes.plot(*asked, linestyle="", marker="*", markersize=14, color="#1b1f24", label="asked", zorder=5)
    shown = [n for points in curves.values() for point in points for n in point[:1]] + [asked[0]]
    counts = [n for points in curves.values() for point in points for n in point[1:]] + [asked[1]]
    for axis, values, words in ((axes.xaxis, shown, tokens_in_words), (axes.yaxis, counts, str)):
        powers = range((min(values)).bit_length() - 1, max(values).bit_length() + 1)
        axis.set_major_locator(FixedLocator([2**n for n in powers][:: max(1, len(powers) // 10)]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda n, _, words=words: words(int(n))))
    axes.set(xlabel="context (tokens per row)", ylabel="rows that fit (batch)")
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.grid(color="#e3e7ec", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.supxlabel(caption, fontsize=8, color="#6b7480", x=0.01, ha="left")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=160)
    write_named(path, out.getvalue())


def tokens_in_words(count: int) -> str:
    """Write a number of tokens as text.

    >>> tokens_in_words(131072), tokens_in_words(2**20), tokens_in_words(1000)
    ('128k', '1M', '1000')
    """
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)
