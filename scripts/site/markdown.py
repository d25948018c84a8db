"""Markdown that generated pages share: tables, escaped text, links to papers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_CODE = re.compile(r"(`[^`]*`)")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""A table; a | within a cell is escaped.

    >>> print(table(["a"], [["x|y"]]))
    | a |
    |---|
    | x\|y |
    """

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(heads), "|" + "---|" * len(heads), *map(line, rows)])


def escaped(text: str) -> str:
    r"""Text whose <, *, _ and [ mean themselves; what is between backticks stays as it is.

    >>> escaped("a_1 * b, `c_1`")
    'a\\_1 \\* b, `c_1`'
    """
    return "".join(
        part if part.startswith("`") else re.sub(r"([<*_\[\]])", r"\\\1", part) for part in _CODE.split(text)
    )


def paper(arxiv: str) -> str:
    """A link to a preprint, "" without an id."""
    return f"[arXiv:{arxiv}](https://arxiv.org/abs/{arxiv})" if arxiv else ""


def filtered(text: str) -> str:
    """A table over which the site's script puts a search field and choices for columns of few values."""
    return f":::{{container}} filtered\n{text}\n:::"
