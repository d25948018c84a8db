"""The page of all architectures, generated from `kvjax.architectures()`."""

from __future__ import annotations

import kvjax
from scripts.site.markdown import escaped, filtered, paper, table


def page() -> str:
    """Write a table of all architectures, and a card of each."""
    infos = kvjax.architectures()
    heads = ("architecture", "family", "trains by", "what it does")
    rows = [
        (f"[{i.id}](#{i.id})", i.family, f"`--gin {i.training}`" if i.training else "", escaped(i.about))
        for i in infos
    ]
    about = (
        f"{len(infos)} architectures, as `kvjax architectures` lists them. "
        "[Architectures](../architectures.md) has what they cost and what they are worth."
    )
    return (
        "\n\n".join(["# Architecture cards", about, filtered(table(heads, rows)), *map(_card, infos)]) + "\n"
    )


def _card(info: kvjax.models.architectures.ArchitectureInfo) -> str:
    lines = [
        f"{escaped(info.title)} {paper(info.arxiv)}",
        f"**In a `Config`**: `{info.words}`",
        f"**Keeps** {escaped(info.state)}",
    ]
    if info.aliases:
        lines.append(f"**Also called** {', '.join(info.aliases)}")
    if info.training:
        lines.append(f"**Trained by** `kvjax train --gin {info.training}`")
    return f"## {info.id}\n\n{escaped(info.about)}.\n\n" + "  \n".join(lines)
