"""The table of kvpress names in docs/methods.md, made from what is written beside each method's function.

A test compares the page with what this prints.

    python scripts/methods_page.py            # prints the table
    python scripts/methods_page.py --write    # puts it into docs/methods.md
"""

from __future__ import annotations

from docs_tables import print_or_write

from kvjax.methods import METHODS


def table() -> str:
    lines = ["| kvpress | kvjax | same scores and same set |", "|---|---|---|"]
    for id, function in METHODS.items():
        press = function.paper.kvpress
        if press is not None:
            ours = f"{id}:{press.hyper}" if press.hyper else id
            lines.append(f"| `{press.name}` | `{ours}` | {press.same} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print_or_write(__doc__, "methods.md", {"kvpress": table})
