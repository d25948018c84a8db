"""Shared by scripts that make tables for docs/: the data files, and tables between two marks in a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def write_table(page: str, name: str, table: str) -> None:
    """Write `table` into docs/`page`, between the marks of `name`."""
    from kvjax.base.atomic_files import write_atomic

    write_atomic(DOCS / page, with_table((DOCS / page).read_text(), name, table).encode())


def with_table(text: str, name: str, table: str) -> str:
    """Put `table` between the marks of `name` in a page's text."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, rest = text.split(start)
    return f"{before}{start}\n{table}\n{end}{rest.split(end)[1]}"


def data_text(value: Any, depth: int = 1) -> str:
    """JSON text in which every entry down to `depth` levels has a line of its own.

    >>> print(data_text({"h2o": {"seconds": 2, "bytes": [1, 3]}, "tova": {}}))
    {
    "h2o": {"seconds": 2, "bytes": [1, 3]},
    "tova": {}
    }
    """
    if not depth or not value or not isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {data_text(one, depth - 1)}" for key, one in value.items()]
    else:
        entries = [data_text(one, depth - 1) for one in value]
    start, end = "{}" if isinstance(value, dict) else "[]"
    return f"{start}\n" + ",\n".join(entries) + f"\n{end}"
