"""docs/explanation/pages.png: which request holds each page of a pool, iteration by iteration.

    python -m scripts.studies.pages_picture

Simulated: twelve requests of three common prefixes in a pool of 48 pages, where not all have room at once.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from kvjax.serve.grammar import System, words
from kvjax.serve.load.synth import synthetic
from kvjax.serve.loop import ServingLoop
from kvjax.serve.sim import Costs, simulate

FILE = Path(__file__).parents[2] / "docs" / "explanation" / "pages.png"
SYSTEM = System(words.Blocks(16), words.Tree(), words.LRU(), batch=words.Chunked(128, 8))
REQUESTS = "tree:requests=12,groups=3,prefix=96,suffix=48,output=24,seed=1"
COSTS = Costs("by hand", 0.01, 0.0, 2e-6, 1e-5, 0.0, 1e-5, 1e6, 1.0)
PAGES = 48
# What a page holds: nothing; a prefix that no running request uses; slots of several requests; then requests.
FREE, KEPT, SHARED = -3, -2, -1


def held() -> np.ndarray:
    """Record what every page holds before each effect of the loop, [page, effect]: a request, or as above."""
    columns: list[list[int]] = []

    def watch(loop: ServingLoop) -> None:
        column = [FREE] * PAGES
        for page in loop.ledger.kept:
            column[page] = KEPT
        for entry in (*loop.reading, *loop.writing):
            # Pages taken ahead for further steps hold nothing yet.
            used = -(-max(entry.slots, entry.goal) // SYSTEM.page)
            for page in loop.ledger.tables[entry.request.id][:used]:
                column[page] = entry.request.id if column[page] in (FREE, KEPT) else SHARED
        columns.append(column)

    simulate(SYSTEM, synthetic(REQUESTS), COSTS, pages=PAGES, steps=1, watch=watch)
    return np.array(columns).T


def picture(found: np.ndarray) -> bytes:
    """Draw the pages over time as a PNG."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    of_requests = colormaps["tab20"].colors[: found.max() + 1]
    first = {FREE: "white", KEPT: "#d9d9d9", SHARED: "black"}
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.add_subplot()
    colours = ListedColormap([*first.values(), *of_requests])
    axes.imshow(
        found - FREE, cmap=colours, vmin=0, vmax=colours.N - 1, aspect="auto", interpolation="nearest"
    )
    axes.set_xlabel("step of the loop")
    axes.set_ylabel("page")
    names = "free", "a prefix kept for others", "shared by several requests", "of one request"
    shown = [*first.values(), of_requests[0]]
    axes.legend(
        [Patch(facecolor=colour, edgecolor="grey") for colour in shown], names, ncols=4, fontsize=8,
        loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False,
    )  # fmt: skip
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=100, metadata={"Software": None})
    return data.getvalue()


if __name__ == "__main__":
    FILE.write_bytes(picture(held()))
