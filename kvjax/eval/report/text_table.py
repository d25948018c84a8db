"""A comparison on a text: means over windows per method and budget, and their table.

One row per window and method goes in: id, method, budget, nll, full_nll, kl, top1, kept_bytes, full_bytes,
read_bytes, tokens, distances.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvjax.eval.report.cells import bootstrap_interval, budget_label
from kvjax.eval.report.console import make_console, print_text
from kvjax.eval.report.distances import summarise_distances
from kvjax.eval.report.duels import Duels, duels_of
from kvjax.eval.report.figures import larger_rows, signed
from kvjax.eval.report.frontier import Axis, Panel, Point
from kvjax.eval.report.paired import FEW, difference

LOST = Axis("nats per token more than with the full cache", None, higher=False)


def summarise_windows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the windows of one method and budget; delta_nll and p are paired with the full cache.

    >>> row = dict(id="a", method="int8", budget=None, nll=2.5, full_nll=2.0, kl=0.0, top1=1.0, tokens=128)
    >>> row |= dict(kept_bytes=30, full_bytes=100, read_bytes=30)
    >>> found = summarise_windows([row, row | dict(id="b", nll=3.0)])
    >>> found["delta_nll"], found["tokens"], found["windows"]
    (0.75, 256, 2)
    """
    deltas = [row["nll"] - row["full_nll"] for row in rows]
    low, high = bootstrap_interval(deltas)
    mean = {
        name: float(np.mean([row[name] for row in rows]))
        for name in ("nll", "full_nll", "kl", "top1", "kept_bytes", "full_bytes", "read_bytes")
    }
    ours, full = ({("text", row["id"]): row[name] for row in rows} for name in ("nll", "full_nll"))
    if any("host_bytes" in row for row in rows):
        mean["host_bytes"] = float(np.mean([row.get("host_bytes", 0) for row in rows]))
    paired = difference(ours, full, shares=False)
    return {
        "method": rows[0]["method"],
        "budget": rows[0]["budget"],
        **mean,
        "delta_nll": float(np.mean(deltas)),
        "delta_low": low,
        "delta_high": high,
        "p": None if paired is None else paired.p,
        "tokens": sum(row["tokens"] for row in rows),
        "windows": len(rows),
        "distances": summarise_distances(rows),
    }


def summarise_text(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`summarise_windows` of every method and budget, in order of appearance."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["method"], repr(row["budget"])), []).append(row)
    return [summarise_windows(group) for group in groups.values()]


def text_panels(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Return the frontier of a text: what each method loses against the bytes it keeps."""
    points = []
    for row in rows:
        kept, read = (100 * row[f"{name}_bytes"] / row["full_bytes"] for name in ("kept", "read"))
        full = row["method"] == "full"
        points.append(
            Point(row["method"], kept, read, read <= 0.95 * kept, row["delta_nll"], ends_of(row), full)
        )
    return [Panel("text", "what follows compressed windows of a text", points)]


def text_duels(rows: Iterable[Mapping[str, Any]]) -> list[Duels]:
    """Return every method against every other, in nats per token of the same windows."""
    made = ({**row, "task": "text", "protocol": "text", "score": row["nll"]} for row in rows)
    return duels_of(made, shares=False)


def ends_of(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """Compute the interval of a method's loss; None for too few windows, and if all are equal."""
    if row["windows"] < FEW or row["delta_low"] == row["delta_high"]:
        return None
    return row["delta_low"], row["delta_high"]


def lost_ends(row: Mapping[str, Any]) -> str:
    """Return the interval of a method's loss, or why there is none.

    >>> lost_ends({"windows": 8, "delta_low": -0.001, "delta_high": 0.02}), lost_ends({"windows": 2})
    ('-0.0010..0.0200', 'n=2')
    >>> lost_ends({"windows": 8, "delta_low": 0.0, "delta_high": 0.0})
    'alike'
    """
    if row["windows"] < FEW:
        return f"n={row['windows']}"
    ends = ends_of(row)
    return "alike" if ends is None else f"{ends[0]:z.4f}..{ends[1]:z.4f}"


def print_stream(rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print the rows of a text: bytes, nats per token and their rise, KL, same top token.

    >>> row = dict(method="full", budget=None, nll=2.0, delta_nll=0.0, delta_low=0.0, delta_high=0.0, kl=0.0)
    >>> row |= dict(top1=1.0, kept_bytes=2048, full_bytes=2048, read_bytes=2048, tokens=128, windows=1)
    >>> print_stream([row], Console(width=100))  # doctest: +ELLIPSIS
    <BLANKLINE>
    text: ...
    """
    console = console or make_console()
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("method", style="bold", overflow="fold")
    far = any("host_bytes" in row for row in rows)
    kept = ("kept\nKiB", "kept\n%", *(("host\n%",) if far else ()), "read\n%")
    headers = ("budget", *kept, "nats/\ntoken", "lost", "KL", "same\ntop %")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(row["method"]),
            budget_label(row["budget"]).removesuffix(" slots"),
            f"{row['kept_bytes'] / 1024:.1f}",
            f"{100 * row['kept_bytes'] / row['full_bytes']:.1f}",
            *((f"{100 * row.get('host_bytes', 0) / row['full_bytes']:.1f}",) if far else ()),
            f"{100 * row['read_bytes'] / row['full_bytes']:.1f}",
            f"{row['nll']:.4f}",
            Text.assemble(signed(row["delta_nll"], 4), (f" {lost_ends(row)}", "dim")),
            f"{row['kl']:z.1e}",
            f"{100 * row['top1']:.1f}",
        )
    first = rows[0]
    console.print(
        Text(f"\ntext: {first['tokens']} tokens after {first['windows']} compressed windows", style="bold")
    )
    console.print(table)
    few = " n=...: n too small for an interval." if first["windows"] < FEW else ""
    few = few or " alike: in all windows the same." if any(ends_of(row) is None for row in rows) else few
    print_text(
        console,
        "nats/token: -log p of the text; lost: what that is more than with the full cache, with the 95% "
        f"interval over windows.{few} KL(full || method) of the next token. {larger_rows(rows)}".rstrip(),
        style="dim",
    )
