"""What the scripts share that make a table of a page in docs/: its data, and the table between two marks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def print_or_write(about: str | None, page: str, tables: dict[str, Callable[[], str]]) -> None:
    """Prints every table; with --write puts it into docs/`page` between the marks of its name."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put it into docs/{page}")
    write = parser.parse_args().write
    for name, table in tables.items():
        if write:
            write_table(page, name, table())
        else:
            print(table())


def write_table(page: str, name: str, text: str) -> None:
    """Puts `text` into docs/`page` between the marks of `name`."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, rest = (DOCS / page).read_text().split(start)
    (DOCS / page).write_text(f"{before}{start}\n{text}\n{end}{rest.split(end)[1]}")


def data_text(value: Any, depth: int = 1) -> str:
    """JSON whose entries down to `depth` levels have a line each.

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
