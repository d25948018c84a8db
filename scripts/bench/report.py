"""Output of benchmarks: rows on the terminal, tables in Markdown, and a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print the table, at its full width if the output is a file."""
    from rich.table import Table

    from kvjax.eval.report.console import make_console

    columns = list(dict.fromkeys(k for r in rows for k in r))
    table = Table(*columns)
    for r in rows:
        table.add_row(*(str(r.get(c, "")) for c in columns))
    make_console().print(table)


def write_json(path: str | None, found: Any) -> None:
    """Write results to a file atomically; do nothing without a path."""
    from kvjax.base.atomic_files import write_atomic

    if path is not None:
        write_atomic(Path(path), (json.dumps(found, indent=1) + "\n").encode())


def cell(value: float | None, form: str = ".1f", unit: str = "") -> str:
    """Write a number in a table, or a dash where there is none."""
    return "–" if value is None else f"{value:{form}}{unit}"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
