"""The picture of bits.py: KL by bits per number, a panel for keys above one for values."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

PANELS = {"keys": ("keys", "unrotated keys"), "values": ("values",)}


def picture(rows: Mapping[str, Mapping[str, float]]) -> bytes:
    """Draw a PNG: KL by bits per number, a line for each scheme."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure((5.2, 13), dpi=140, layout="constrained")
    for axis, (title, parts) in zip(figure.subplots(2, 1, sharey=True), PANELS.items(), strict=True):
        axis.set_prop_cycle(color=colormaps["tab20"].colors)
        for label, points in lines(rows, parts).items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, linewidth=1, label=label)
        axis.set(title=title, xlabel="bits per number, ranges included", yscale="log")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=7.5, loc="upper center", bbox_to_anchor=(0.4, -0.12), frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylabel("KL from the uncoded cache, nats per token")
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()


def lines(
    rows: Mapping[str, Mapping[str, float]], parts: Sequence[str]
) -> dict[str, list[tuple[float, float]]]:
    """Return (bits, KL) of the levels of each scheme of these parts; seeds are left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, row in rows.items():
        part, rest = name.split(", ", 1)
        if part in parts and "seed" not in name:
            label = rest.rpartition(",")[0] + (" (before RoPE)" if part.startswith("unrotated") else "")
            found.setdefault(label, []).append((row["bits"], row["kl"]))
    return found
