"""`kvjax methods`: every method, with its paper and its hyper-parameters."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text

HELP = "list the methods: papers, what they act on, hyper-parameters with their defaults"
EXAMPLE = """examples:
  kvjax methods
  kvjax methods --verb make
  kvjax methods --json"""

_WIDE_COLUMNS = 110
_LEGEND = (
    "Second line: what a method decides (keep, store, read, reread, place), when it acts (prefill, decode, "
    "both), its family, its paper, and whether it deviates from it (its docstring says how). budget: a "
    "fraction of the tokens kept, or slots per head. Write snapkv:window=16 to set a hyper-parameter, "
    "snapkv+kivi to chain, my_file.py:my_method for your own. variant=paper (snapkv, pyramidkv) selects per "
    "query head: with grouped queries, it costs (query heads / KV heads) times the bytes of its budget."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verb", metavar="V", help="those that decide so; make lists the architectures, too")
    parser.add_argument("--json", action="store_true", help="print one JSON array instead of a table")


def run(args: argparse.Namespace) -> None:
    from kvjax.commands import architectures

    rows = listing()
    rows = rows if args.verb is None else architectures.of_verb(rows, args.verb)
    made = architectures.listing() if args.verb == "make" else []
    if args.json:
        import json

        print(json.dumps(rows + made, indent=2))
        return
    _print_table(rows)
    if made:
        print()
        architectures.print_table(made)


def listing() -> list[dict[str, Any]]:
    """Every method as plain values: the fields of MethodInfo, url, aliases, takes_budget, hyper-parameters.

    >>> [row["hyper"] for row in listing() if row["id"] == "kivi"]
    [{'bits': 2, 'group': 32, 'residual': 128}]
    """
    import inspect

    from kvjax.methods import METHODS, methods

    rows = []
    for info in methods():
        function = METHODS[info.id]
        parameters = inspect.signature(function).parameters
        row = info._asdict() | {
            "verbs": list(info.verbs),
            "url": f"https://arxiv.org/abs/{info.arxiv}" if info.arxiv else None,
            "aliases": list(function.paper.aliases),
            "takes_budget": "budget" in parameters,
            "hyper": {name: p.default for name, p in parameters.items() if p.default is not p.empty},
        }
        rows.append(row)
    return rows


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from kvjax.commands.terminal import BOX, console, print_text

    out = console()
    wide = out.width >= _WIDE_COLUMNS
    table = Table(box=BOX, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("id", style="bold", no_wrap=True)
    table.add_column("method", ratio=3)
    if wide:
        table.add_column("hyper-parameters", ratio=2)
    for row in rows:
        words = (["budget"] if row["takes_budget"] else []) + [f"{k}={v}" for k, v in row["hyper"].items()]
        hyper = Text(", ".join(words) or "–")
        details = Text("\n").join([Text(row["title"]), _details(row), *([] if wide else [hyper])])
        table.add_row(row["id"], details, *([hyper] if wide else []))
        table.add_section()
    out.print(table)
    out.print()
    print_text(out, f"{len(rows)} methods. {_LEGEND}", style="dim")


def _details(row: dict[str, Any]) -> Text:
    """What it decides, when, of which family, where it was published."""
    from rich.text import Text

    acts = [", ".join(row["verbs"]), row["phase"]] if row["verbs"] else []
    text = Text(" · ".join([*acts, row["family"]]), style="dim")
    if row["url"]:
        text.append(" · ")
        text.append(f"arXiv:{row['arxiv']}", style=f"link {row['url']}")
        text.append(f" ({row['year']})")
    if row["exact"] == "deviates":
        text.append(" · deviates")
    if row["aliases"]:
        text.append(f" · also {', '.join(row['aliases'])}")
    return text
