"""The content of a saved cache, from its header and positions: reads no keys or values, builds no method."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.table import Table
from rich.text import Text

from kvjax.commands.terminal import BOX, console, pairs, size
from kvjax.grammar.to_text import name_of
from kvjax.io.cache_arrays import SavedArrays
from kvjax.io.cache_file import damage, read_cache_header

_PARTS = {"k": "keys", "v": "values", "pos": "positions", "first": "page tables", "lengths": "page tables"}
_PARTS |= {"owner": "page tables", "next": "positions", "near": "copies on the device"}


def print_cache(path: str) -> None:
    """Print method, model, rows, live slots and bytes of a cache file; InputError if it is not one."""
    head = read_cache_header(path)
    with damage(path):
        leaves = list(_leaves(head.tree, ""))
        total = sum(count for _, count in leaves)
        file = SavedArrays(Path(path), head.parts)
        seen = _whole(head.tree["next"], "next", file)
        live = np.concatenate([np.zeros(0, np.int32), *(x.ravel() for x in _live(head.tree, file))])
        segments = ", ".join(dict.fromkeys(_segments(head.tree)))
    out = console()
    rows = [
        ("cache", path),
        ("method", "none" if head.spec is None else name_of(head.spec)),
        ("model", f"fingerprint {head.model or 'none'}"),
        ("written by", f"kvjax {head.kvjax}"),
        (
            "rows",
            f"{len(seen)}, tokens seen: {', '.join(map(str, seen[:16]))}{', ...' if len(seen) > 16 else ''}",
        ),
        (
            "live slots",
            f"{live.mean():.1f} per head and layer, from {live.min()} to {live.max()}"
            if live.size
            else "none: no layer keeps slots",
        ),
        ("segments", segments),
    ]
    out.print(pairs(rows))
    out.print()
    table = Table(box=BOX, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("part")
    table.add_column("bytes", justify="right")
    table.add_column("%", justify="right")
    sums: dict[str, int] = {}
    for part, count in leaves:
        sums[part] = sums.get(part, 0) + count
    for part, count in [*sums.items(), ("all", total)]:
        style = "bold" if part == "all" else ""
        table.add_row(
            Text(part, style), Text(size(count), style), Text(f"{100 * count / max(total, 1):.1f}", style)
        )
    out.print(table)


def _leaves(node: Any, place: str) -> Iterator[tuple[str, int]]:
    """Return (part, bytes) of every array of a saved tree."""
    if isinstance(node, list):
        for child in node:
            yield from _leaves(child, place)
    elif isinstance(node, dict) and "node" not in node and "array" in node:
        part = _PARTS.get(place, place) + (" in host memory" if node.get("memory") == "host" else "")
        yield part, int(np.prod(node["shape"])) * jnp.dtype(node["array"]).itemsize
    elif isinstance(node, dict):
        for name, child in node.items():
            # Everything nested in keys, values or statistics is counted with them.
            whole = place in ("k", "v", "traces", "summary", "states", "near")
            below = (
                "states"
                if node.get("node") == "State"
                else place
                if whole or name in ("dict", "data")
                else name
            )
            yield from _leaves(child, below)


def _live(tree: dict[str, Any], file: SavedArrays) -> Iterator[np.ndarray]:
    """Live slots [Lg, B, K] of every group that has slots."""
    for g, group in enumerate(tree["groups"]):
        if group["state"] is not None:
            continue
        counts = []
        bodies = [(f"bodies.{i}", body) for i, body in enumerate(group["bodies"])]
        for place, segment in [*bodies, ("sinks", group.get("sinks")), ("tail", group["tail"])]:
            if segment is None:
                continue
            of = "lengths" if segment["node"] == "Paged" else "pos"
            found = _whole(segment[of], f"groups.{g}.{place}.{of}", file)
            counts.append(found if of == "lengths" else (found >= 0).sum(-1))
        yield np.sum(counts, axis=0)


def _whole(node: dict[str, Any], name: str, file: SavedArrays) -> np.ndarray:
    return file.read(name, jnp.dtype(node["array"]), node["shape"], (slice(None),) * len(node["shape"]))


def _segments(tree: dict[str, Any]) -> Iterator[str]:
    for group in tree["groups"]:
        if group["state"] is not None:
            yield "states"
        for segment in filter(None, [*group["bodies"], group["tail"]]):
            paged = segment["node"] == "Paged"
            node = tree["pools"][segment["pool"]] if paged else segment
            yield f"{'pages' if paged else 'slots'} ({node['k'].get('array') or node['k']['codec']['codec']})"
