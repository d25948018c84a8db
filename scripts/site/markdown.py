"""Markdown of generated pages: tables, escaped text, links to papers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_CODE = re.compile(r"(`[^`]*`)")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""Write a table; | inside a cell is escaped.

    >>> print(table(["a"], [["x|y"]]))
    | a |
    |---|
    | x\|y |
    """

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(heads), "|" + "---|" * len(heads), *map(line, rows)])


def escaped(text: str) -> str:
    r"""Escape <, *, _ and [ in a text; text between backticks is unchanged.

    >>> escaped("a_1 * b, `c_1`")
    'a\\_1 \\* b, `c_1`'
    """
    return "".join(
        part if part.startswith("`") else re.sub(r"([<*_\[\]])", r"\\\1", part) for part in _CODE.split(text)
    )


def paper(arxiv: str) -> str:
    """Link a preprint; "" without an arXiv id."""
    return f"[arXiv:{arxiv}](https://arxiv.org/abs/{arxiv})" if arxiv else ""


def filtered(text: str) -> str:
    """Write a table that the site's script makes searchable, with a filter for every column of few values."""
    return f":::{{container}} filtered\n{text}\n:::"
