"""Printing for the subcommands: one console, one kind of table, human-readable sizes."""

from __future__ import annotations

import sys

from rich.box import SIMPLE_HEAD as BOX
from rich.table import Table

from kvjax.base.streams import escaped
from kvjax.eval.report.console import make_console as console
from kvjax.eval.report.console import print_text
from kvjax.eval.report.progress import tracked

__all__ = ["BOX", "console", "pairs", "print_part", "print_text", "size", "tracked"]


def print_part(text: str) -> None:
    """Write a piece of text to standard output at once, with control characters escaped."""
    sys.stdout.write(escaped(text))
    sys.stdout.flush()


def pairs(rows: list[tuple[str, str]]) -> Table:
    """Build a table of names on the left and values on the right, which wrap."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def size(count: int | float) -> str:
    """Format bytes in the unit that leaves one to three digits before the point.

    >>> size(512), size(1536), size(3 * 2**20)
    ('512 B', '1.5 KiB', '3.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
