"""Cards of all methods as pages of a site: one per family, and README.md, which lists them.

    python scripts/methods_page.py OUT    # writes them into the folder OUT

`kvjax methods ID` prints one card.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from kvjax.commands.methods_cards import Card, about_family, card, families
from kvjax.commands.methods_text import (
    SCORE_HEADS,
    company,
    facts,
    in_kvpress,
    paper_of,
    score_rows,
    shipped,
    unwrapped,
)


def write(folder: Path) -> None:
    """Writes the pages into a folder, which is made where there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    for family, ids in families().items():
        (folder / f"{family}.md").write_text(page(family, [card(id) for id in ids]))
    (folder / "README.md").write_text(index())


def index() -> str:
    """The page that lists the families and their methods."""
    rows = [
        (
            f"[{family}]({family}.md)",
            about_family(family),
            ", ".join(f"[{id}]({family}.md#{id})" for id in ids),
        )
        for family, ids in families().items()
    ]
    heads = ("family", "what its methods have in common", "methods")
    return f"# Methods by family\n\n{_table(heads, rows)}\n"


def page(family: str, cards: Sequence[Card]) -> str:
    """The page of a family, with the cards of its methods."""
    parts = [f"# {family}", about_family(family), "[All families](README.md)"]
    for found in cards:
        parts += _section(found)
    return "\n\n".join(parts) + "\n"


def _section(found: Card) -> list[str]:
    info = found.info
    link = f"[arXiv:{info.arxiv}](https://arxiv.org/abs/{info.arxiv})"
    paper = paper_of(found).replace(f"arXiv:{info.arxiv}", link) if info.arxiv else paper_of(found)
    parts = [f"## {info.id}", f"{paper}  \n*{' · '.join(facts(found))}*", _escaped(found.title)]
    parts += [_escaped(paragraph) for paragraph in unwrapped(found.about)]
    if found.deviations:
        parts.append(f"**Deviations**: {_escaped(found.deviations)}")
    parts.append(f"```text\n# {found.call}\n{found.sentence}\n```")
    if found.hyper:
        rows = [
            (f"`{x.name}`", f"`{x.default}`" if x.default else "must be given", x.values) for x in found.hyper
        ]
        parts.append(_table(("hyper-parameter", "default", "values"), rows))
    if found.fit:
        parts.append(f"Fitted to a model by `{found.fit}`{shipped(found)}.")
    if said := in_kvpress(found):
        parts.append(f"**In kvpress**: {said}")
    parts += ["  \n".join(f"**{head}**: {_escaped(text)}" for head, text in company(found))]
    if found.lines:
        parts.append(_table(SCORE_HEADS, score_rows(found.lines)))
    return [part for part in parts if part]


def _escaped(text: str) -> str:
    """Text whose < would begin a tag of HTML; what is between backticks stays as it is."""
    return "".join(
        part if part.startswith("`") else part.replace("<", "\\<") for part in re.split(r"(`[^`]*`)", text)
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    line = lambda cells: "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"  # noqa: E731
    return "\n".join([line(heads), "|" + "---|" * len(heads), *map(line, rows)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder")
    write(parser.parse_args().out)
