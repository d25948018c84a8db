"""docs/systems.md: serving systems and papers on how requests are computed, from their functions' `@paper`.

    python -m scripts.site.systems

writes the tables; a test compares them with the functions.
"""

from __future__ import annotations

from pathlib import Path

from kvjax.serve.systems import SYSTEMS
from kvjax.serve.systems.kernels import KERNELS
from scripts.docs_tables import with_table
from scripts.site.markdown import escaped, table

PAGE = Path(__file__).parents[2] / "docs" / "systems.md"


def system_table() -> str:
    """Write a row per system: its paper, the claim the simulator confirms in direction, where it reverses."""
    rows = [
        (f"`{one.id}`", _linked(one.title, one.url), escaped(one.claim), escaped(one.reverses))
        for one in (function.paper for function in SYSTEMS.values())
    ]
    return table(("system", "paper", "claim, in direction on the simulator", "where it reverses"), rows)


def kernel_table() -> str:
    """Write a row per kernel: its paper, what runs in its place, the count, where it reverses."""
    rows = [
        (
            f"`{one.id}`",
            _linked(one.title, one.url),
            f"`{one.runs}`",
            escaped(one.claim),
            escaped(one.reverses),
        )
        for one in KERNELS.values()
    ]
    return table(("id", "paper", "what runs in its place", "claim, as a count", "where it reverses"), rows)


def _linked(title: str, url: str) -> str:
    return f"[{escaped(title)}]({url})" if url else escaped(title)


TABLES = {"systems": system_table, "kernels": kernel_table}


def main() -> None:
    """Write both tables."""
    text = PAGE.read_text()
    for name, made in TABLES.items():
        text = with_table(text, name, made())
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
