"""Cards of all methods, as `kvjax methods ID` prints them: a page per family, and a table of all."""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.commands.methods_cards import Card, abouts, card, families
from kvjax.commands.methods_text import (
    SCORE_HEADS,
    SCORES_ARE,
    company,
    facts,
    in_kvpress,
    paper_of,
    score_rows,
    shipped,
    unwrapped,
)
from scripts.site.markdown import escaped, filtered, paper, table

_ACTS = {
    "prefill": "prompts",
    "decode": "steps",
    "both": "prompts, steps",
    "none": "never",
}


def pages() -> dict[str, str]:
    """Write the pages by their names."""
    cards = {family: [card(id) for id in ids] for family, ids in families().items()}
    found = {family: page(family, of_family) for family, of_family in cards.items()}
    return found | {"index": index([one for of_family in cards.values() for one in of_family])}


def index(cards: Sequence[Card]) -> str:
    """Write the page that lists all methods, with filters for family, phase and training."""
    heads = ("method", "paper", "family", "acts after", "fitted")
    rows = [
        (
            f"[{x.id}]({x.family}.md#{x.id})",
            f"{escaped(x.title)} {paper(x.arxiv)}",
            x.family,
            _ACTS[x.phase],
            "yes" if x.training else "no",
        )
        for x in (found.info for found in cards)
    ]
    pages = "\n".join(families())
    return (
        f"# Method cards\n\n{len(rows)} methods; `kvjax methods` lists them in a terminal, and "
        f"`kvjax methods ID` prints a card.\n\n{filtered(table(heads, rows))}\n\n"
        f"```{{toctree}}\n:hidden:\n\n{pages}\n```\n"
    )


def page(family: str, cards: Sequence[Card]) -> str:
    """Write the page of a family, with the cards of its methods."""
    found = abouts(family)
    about = "\n".join(f"* {escaped(text)}" for text in found) if len(found) > 1 else escaped(found[0])
    parts = [f"# Methods: {family}", about, "[All methods](index.md)"]
    for one in cards:
        parts += _section(one)
    return "\n\n".join(parts) + "\n"


def _section(found: Card) -> list[str]:
    info = found.info
    title = (
        paper_of(found).replace(f"arXiv:{info.arxiv}", paper(info.arxiv)) if info.arxiv else paper_of(found)
    )
    parts = [f"## {info.id}", f"{title}  \n*{' · '.join(facts(found))}*", escaped(found.title)]
    parts += [escaped(paragraph) for paragraph in unwrapped(found.about)]
    if found.deviations:
        parts.append(f"**Deviations**: {escaped(found.deviations)}")
    if found.codes:
        parts.append(found.codes)
    parts.append(f"```text\n# {found.call}\n{found.sentence}\n```")
    if found.hyper:
        rows = [
            (f"`{x.name}`", f"`{x.default}`" if x.default else "must be given", escaped(x.values))
            for x in found.hyper
        ]
        parts.append(table(("hyper-parameter", "default", "values"), rows))
    if found.fit:
        parts.append(f"Fitted to a model by `{found.fit}`{shipped(found)}.")
    if said := in_kvpress(found):
        parts.append(f"**In kvpress**: {said}")
    if found.lines:
        parts += [SCORES_ARE.replace("leaderboard", "[leaderboard](../../leaderboard.md)")]
        parts.append(table(SCORE_HEADS, score_rows(found.lines)))
    if lines := company(found):
        text = "  \n".join(f"**{head}**: {escaped(text)}" for head, text in lines)
        parts.append(f"<details><summary>What it chains with</summary>\n\n{text}\n\n</details>")
    return [part for part in parts if part]
