"""The needle map: scores by the length of a context and the depth of the needed tokens in it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from kvjax.eval.report.cells import Row, budget_label
from kvjax.eval.report.method_cards import families_of

DEPTHS = 5
# Contexts of nominally equal length differ by less than this factor.
_ALIKE = 1.25
ALL = "all tasks"


def bin_of(depth: float) -> int:
    """Return the bin of a depth in [0, 1]: 0 at the start of the context.

    >>> bin_of(0.0), bin_of(0.2), bin_of(1.0)
    (0, 1, 4)
    """
    return min(DEPTHS - 1, int(depth * DEPTHS))


def lengths_of(tokens: Iterable[int]) -> dict[int, str]:
    """Lengths of contexts to names of groups that differ by less than a quarter.

    >>> lengths_of([1000, 1020, 2040])
    {1000: '1000–1020', 1020: '1000–1020', 2040: '2040'}
    """
    groups: list[list[int]] = []
    for length in sorted(set(tokens)):
        if not groups or length >= _ALIKE * groups[-1][0]:
            groups.append([])
        groups[-1].append(length)
    name = lambda group: f"{group[0]}–{group[-1]}" if len(group) > 1 else str(group[0])  # noqa: E731
    return {length: name(group) for group in groups for length in group}


def needle_maps(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """One map per protocol and task, and one of all tasks: per method, budget and length, [mean, n] by depth.

    Rows without `depth` or `context_tokens` have no needle and are skipped. [] if there are none.
    """
    known = [row for row in rows if row.get("depth") is not None and row.get("context_tokens")]
    names = lengths_of(row["context_tokens"] for row in known)
    maps: dict[str, dict[tuple[str, str, str], list[list[float]]]] = {}
    many = len({row["task"] for row in known}) > 1
    for row in known:
        key = (row["method"], budget_label(row["budget"]), names[row["context_tokens"]])
        for task in (*((ALL,) if many else ()), row["task"]):
            cells = maps.setdefault(f"{row['protocol']} · {task}", {})
            cells.setdefault(key, [[] for _ in range(DEPTHS)])[bin_of(row["depth"])].append(row["score"])
    return [
        {
            "title": title,
            "rows": [
                {
                    "name": method,
                    "budget": budget,
                    "length": length,
                    "families": " ".join(families_of(method)),
                    "cells": [_cell(scores) for scores in bins],
                }
                for (method, budget, length), bins in cells.items()
            ],
        }
        for title, cells in maps.items()
    ]


def _cell(scores: Sequence[float]) -> list[float | int] | None:
    return [round(math.fsum(scores) / len(scores), 4), len(scores)] if scores else None


def needles_section(rows: Sequence[Row]) -> str:
    """Make the section that the page's script fills; "" if no sample has a needle."""
    maps = needle_maps(rows)
    if not maps:
        return ""
    data = escape(json.dumps(maps, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
    heads = "".join(f"<th>{100 * i // DEPTHS}–{100 * (i + 1) // DEPTHS}%</th>" for i in range(DEPTHS))
    return f"""<section id="needles" data-maps="{data}"><h2>Where the needle lies</h2>
<p class="muted">Mean score (%) by how deep in the context the first token lies that the answer needs: 0% is
its start, 100% its end. Point at a cell for its samples.</p>
<div class="controls"><label><span class="label">questions</span><select id="needle"></select></label></div>
<div class="scroll"><table class="heat"><thead><tr><th class="text">method</th><th>budget</th>
<th>context</th>{heads}</tr></thead><tbody id="heat"></tbody></table></div></section>"""
