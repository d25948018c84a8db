"""Where tables are printed: a terminal has a width; pipes and files have none."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from kvjax.base.streams import escaped

# Nothing limits a line of a pipe or a file; rich would assume 80 columns.
_UNLIMITED_COLUMNS = 10_000
# Sentences are broken at this width, or at that of a narrower console.
_TEXT_COLUMNS = 140


class _Printing(Console):
    """A console that prints brackets of texts as they are, and their control characters escaped."""

    def __init__(self, **options: Any):
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escaped(segment.text))

    def render_str(self, text: str, **options: Any) -> Text:
        # Escaped before rich measures the width: a table would cut a text that grows later.
        return super().render_str(escaped(text), **options)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console(**options: Any) -> Console:
    """Make a console of standard output, unlimited in width unless it is a terminal or COLUMNS is set.

    options: those of `rich.console.Console`; a given width holds everywhere.

    >>> make_console().width > 20
    True
    """
    out = _Printing(**options)
    limited = out.is_terminal or "COLUMNS" in os.environ or options.get("width") is not None
    return out if limited else _Printing(**options | {"width": _UNLIMITED_COLUMNS})


def print_text(console: Console, text: RenderableType, *, style: str | None = None) -> None:
    """Print sentences, in lines that people can read.

    >>> print_text(Console(width=10_000), "One. " * 40)  # doctest: +ELLIPSIS
    One. One. ...
    """
    console.print(text, style=style, width=min(console.width, _TEXT_COLUMNS))
