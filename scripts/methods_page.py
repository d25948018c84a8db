"""docs/methods/ and the table of kvpress names in docs/methods.md, of what is beside methods' functions.

A test compares the pages with what this makes.

    python scripts/methods_page.py            # prints the table
    python scripts/methods_page.py --write    # puts it into docs/methods.md, writes docs/methods/
"""

from __future__ import annotations

import sys

from docs_tables import DOCS, print_or_write

from kvjax.commands.methods_text import pages
from kvjax.methods import METHODS

FOLDER = DOCS / "methods"


def table() -> str:
    lines = ["| kvpress | kvjax | same scores and same set |", "|---|---|---|"]
    for id, function in METHODS.items():
        press = function.paper.kvpress
        if press is not None:
            ours = f"{id}:{press.hyper}" if press.hyper else id
            lines.append(f"| `{press.name}` | `{ours}` | {press.same} |")
    return "\n".join(lines)


def write_pages() -> None:
    """Writes docs/methods/ anew; a family that is gone loses its page."""
    FOLDER.mkdir(exist_ok=True)
    made = pages()
    for old in FOLDER.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    print_or_write(__doc__, "methods.md", {"kvpress": table})
    if "--write" in sys.argv:
        write_pages()
