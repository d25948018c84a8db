"""`kvjax architectures`: the decoder's parts, with their papers and what each caches; or one of them."""

from __future__ import annotations

import argparse
from typing import Any

HELP = "list the architectures: papers, what they do and keep per token, what makes one in a Config"
EXAMPLE = """examples:
  kvjax architectures
  kvjax architectures yoco
  kvjax architectures --brief --search "linear attention"
  kvjax architectures --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", nargs="?", metavar="ID", help="one of them alone (default: all)")
    parser.add_argument("--family", metavar="F", help="those of a family")
    parser.add_argument("--search", metavar="TEXT", help="those whose rows have all these words")
    parser.add_argument("--brief", action="store_true", help="one line for each")
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def run(args: argparse.Namespace) -> None:
    rows = _chosen(listing(), args.id, args.family, args.search)
    if args.json:
        import json

        print(json.dumps(rows, indent=2))
    elif args.brief:
        print_lines(rows)
    else:
        print_table(rows)


def _chosen(
    rows: list[dict[str, Any]], id: str | None, family: str | None, search: str | None
) -> list[dict[str, Any]]:
    """Return the rows that match the filters; InputError if there are none, with the nearest name."""
    import difflib

    from kvjax.base.errors import InputError
    from kvjax.models.architectures import architecture

    if id is not None:
        try:
            rows = [row for row in rows if row["id"] == architecture(id).id]
        except ValueError as error:
            raise InputError(str(error)) from error
    families = list(dict.fromkeys(row["family"] for row in rows))
    if family is not None and family not in families:
        near = difflib.get_close_matches(family, families, 1)
        hint = f"did you mean {near[0]}?" if near else "see `kvjax architectures`"
        raise InputError(f"--family is {family!r}, expected one of {', '.join(families)}: {hint}")
    words = (search or "").lower().split()

    def text(row: dict[str, Any]) -> str:
        return " ".join(str(x) for x in row.values()).lower()

    found = [r for r in rows if family in (None, r["family"]) and all(word in text(r) for word in words)]
    if not found:
        raise InputError(f"no architecture has all words of {search!r}: search for fewer")
    return found


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
    """Return the methods with a verb; InputError for a verb that does not exist."""
    import difflib

    from kvjax.base.errors import InputError

    known = ["make", "keep", "store", "read", "reread", "stack", "place"]
    if verb not in known:
        near = difflib.get_close_matches(verb, known, 1)
        hint = f"did you mean {near[0]}?" if near else "see `kvjax methods --help`"
        raise InputError(f"--verb is {verb!r}, expected one of {', '.join(known)}: {hint}")
    return [row for row in rows if verb in row["verbs"]]


def print_lines(rows: list[dict[str, Any]]) -> None:
    """Print one line for each architecture or method: its id, its family and its title."""
    from rich.text import Text

    from kvjax.commands.terminal import console

    out, columns = console(), [max(len(row[name]) for row in rows) for name in ("id", "family")]
    for row in rows:
        year = f" ({row['year']})" if row["year"] else ""
        about = row.get("about") or row["title"]
        line = f"{row['id']:<{columns[0]}}  {row['family']:<{columns[1]}}  {about}{year}"
        out.print(Text(line), no_wrap=True, overflow="ellipsis", crop=True)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the architectures, one row each."""
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
    many = f"{len(rows)} architecture{'s' * (len(rows) != 1)}"
    note = "Second line: family, paper, what makes it in a Config, and the file that trains one."
    print_text(out, f"{many}. {note} docs/architectures.md has what they cost.", style="dim")
