"""Where tables are printed: on a terminal in its width; into a pipe or a file as wide as they are."""

from __future__ import annotations

import os

from rich.console import Console, RenderableType

# Nothing limits a line of a pipe or a file; rich would assume 80 columns.
_UNLIMITED_COLUMNS = 10_000
# Sentences are broken here where nothing else limits them.
_TEXT_COLUMNS = 140


def make_console() -> Console:
    """Standard output; without limit where it is no terminal and COLUMNS does not ask for one.

    >>> make_console().width > 20
    True
    """
    out = Console(highlight=False)
    attended = out.is_terminal or "COLUMNS" in os.environ
    return out if attended else Console(highlight=False, width=_UNLIMITED_COLUMNS)


def print_text(console: Console, text: RenderableType, *, style: str | None = None) -> None:
    """Prints sentences, in lines that people can read.

    >>> print_text(Console(width=10_000), "One. " * 40)  # doctest: +ELLIPSIS
    One. One. ...
    """
    console.print(text, style=style, width=min(console.width, _TEXT_COLUMNS))
