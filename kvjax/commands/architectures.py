"""The architectures as `kvjax methods --verb make` lists them: papers, what they do, what they keep."""

from __future__ import annotations

from typing import Any


def listing() -> list[dict[str, Any]]:
    """Every architecture as plain values: the fields of ArchitectureInfo, url, year, and the verb "make".

    >>> [row["state"] for row in listing() if row["id"] == "mqa"]
    ['per token: k and v of one head']
    """
    from kvjax.models.architectures import architectures

    return [
        info._asdict()
        | {
            "aliases": list(info.aliases),
            "year": info.year,
            "url": f"https://arxiv.org/abs/{info.arxiv}" if info.arxiv else None,
            "verbs": ["make"],
        }
        for info in architectures()
    ]


def of_verb(rows: list[dict[str, Any]], verb: str) -> list[dict[str, Any]]:
    """The methods with a verb; InputError for a verb that there is not."""
    import difflib

    from kvjax.errors import InputError

    known = ["make", "keep", "store", "read", "reread", "stack", "place"]
    if verb not in known:
        near = difflib.get_close_matches(verb, known, 1)
        hint = f"did you mean {near[0]}?" if near else "see `kvjax methods --help`"
        raise InputError(f"--verb is {verb!r}, expected one of {', '.join(known)}: {hint}")
    return [row for row in rows if verb in row["verbs"]]


def print_table(rows: list[dict[str, Any]]) -> None:
    """The architectures, one row each."""
    from rich.table import Table
    from rich.text import Text

    from kvjax.commands.terminal import BOX, console, print_text

    out = console()
    table = Table(box=BOX, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("id", style="bold", no_wrap=True)
    table.add_column("architecture", ratio=3)
    table.add_column("state", ratio=2)
    for row in rows:
        details = Text(row["family"], style="dim")
        if row["url"]:
            details.append(" · ")
            details.append(f"arXiv:{row['arxiv']}", style=f"link {row['url']}")
            details.append(f" ({row['year']})")
        details.append(f" · {row['words']}")
        if row["training"]:
            details.append(f" · kvjax train --gin {row['training']}")
        if row["aliases"]:
            details.append(f" · also {', '.join(row['aliases'])}")
        table.add_row(row["id"], Text("\n").join([Text(row["about"]), details]), row["state"])
        table.add_section()
    out.print(table)
    out.print()
    note = "Second line: family, paper, what makes it in a Config, and the file that trains one."
    print_text(
        out, f"{len(rows)} architectures. {note} docs/architectures.md has what they cost.", style="dim"
    )
