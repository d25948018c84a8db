"""`kvjax methods`: every method with its paper and its hyper-parameters, or the card of one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text

HELP = "list the methods: papers, what they act on, hyper-parameters with their defaults; or print one's card"
EXAMPLE = """examples:
  kvjax methods
  kvjax methods snapkv
  kvjax methods --family budget-layer --training no
  kvjax methods --phase decode --search "hash tables"
  kvjax methods --search SnapKVPress
  kvjax methods --verb make
  kvjax methods --brief --family quant
  kvjax methods my_file.py:my_method
  kvjax methods --json"""

_WIDE_COLUMNS = 110
_LEGEND = (
    "Second line: what a method decides (keep, store, read, reread, place), when it acts (prefill, decode, "
    "both), its family, its paper, and whether it deviates from it (its docstring says how). budget: a "
    "fraction of the tokens kept, or slots per head. Write snapkv(window=16) to set a hyper-parameter, "
    "snapkv + kivi to chain, my_file.py:my_method for your own. variant=paper (snapkv, pyramidkv) selects "
    "per query head: with grouped queries, it costs (query heads / KV heads) times the bytes of its budget. "
    "kvjax methods snapkv prints all that is known of one."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "id", nargs="?", metavar="ID|FILE:NAME", help="whose card to print (default: list all)"
    )
    parser.add_argument("--family", metavar="F", help="those of a family, such as quant or budget-head")
    parser.add_argument("--phase", metavar="P", help="those that act in prefill, decode, both or none")
    parser.add_argument("--training", metavar="yes|no", help="those that must be fitted first, or need not")
    parser.add_argument("--search", metavar="TEXT", help="those whose card has all these words")
    parser.add_argument("--verb", metavar="V", help="those that decide so; make lists the architectures, too")
    parser.add_argument("--brief", action="store_true", help="one line for each")
    parser.add_argument("--json", action="store_true", help="print JSON instead: an array, or one card")


def run(args: argparse.Namespace) -> None:
    from kvjax.commands import architectures

    if args.id is not None:
        _print_card(args)
        return
    given = {name: getattr(args, name) for name in FILTERS}
    rows = filtered(listing(), **given)
    rows = rows if args.verb is None else architectures.of_verb(rows, args.verb)
    # Architectures have no family or phase to be found by.
    made = architectures.listing() if args.verb == "make" and not any(given.values()) else []
    if args.json:
        import json

        print(json.dumps(rows + made, indent=2))
        return
    if args.brief:
        architectures.print_lines([*rows, *made])
        return
    _print_table(rows)
    if made:
        print()
        architectures.print_table(made)


def _print_card(args: argparse.Namespace) -> None:
    import json

    from kvjax.base.errors import InputError
    from kvjax.commands.methods_cards import card, plain
    from kvjax.commands.methods_own import check_one, own_card
    from kvjax.commands.methods_text import print_card
    from kvjax.methods import resolve

    for name in (*FILTERS, "verb"):
        if getattr(args, name) is not None:
            raise InputError(
                f"--{name} was given with the method {args.id!r}, expected one of both: leave out --{name} "
                "for its card, or the method for a list"
            )
    if args.brief:
        raise InputError(f"--brief was given with the method {args.id!r}, expected a list: leave one out")
    if ".py:" in args.id:
        found = own_card(args.id)
    else:
        check_one(args.id)
        found = card(resolve(args.id))
    if args.json:
        print(json.dumps(plain(found), indent=2))
    else:
        print_card(found)


def _called(search: str) -> str:
    """Say what a paper is here that was searched for among the methods, if it is no method; else nothing."""
    from kvjax.methods.elsewhere import elsewhere
    from kvjax.serve.systems import SYSTEMS

    name = search.lower().replace(" ", "-")
    if name in SYSTEMS:
        return f"{search} is a serving system: see `kvjax systems {name}`"
    found = elsewhere(search)
    return f"{search} {found}" if found else ""


FILTERS = ("family", "phase", "training", "search")


def filtered(
    rows: list[dict[str, Any]],
    *,
    family: str | None = None,
    phase: str | None = None,
    training: str | None = None,
    search: str | None = None,
) -> list[dict[str, Any]]:
    """Filter the rows of `listing` by all given filters.

    training: "yes" or "no". search: words that must all occur in a method's id, title, aliases, class of
    kvpress or docstring; methods with exactly this name come first, then those with the words in their names.
    InputError for a value that no method has, with the nearest one, and if nothing is left.

    >>> [row["id"] for row in filtered(listing(), family="budget-head", training="yes", search="duo")]
    ['duoattention']
    """
    from kvjax.base.errors import InputError
    from kvjax.methods import METHODS

    family = _one_of("family", family, [row["family"] for row in rows])
    phase = _one_of("phase", phase, ["prefill", "decode", "both", "none"])
    training = _one_of("training", training, ["yes", "no"])
    words = (search or "").lower().split()

    def names(row: dict[str, Any]) -> str:
        press = f"{row['kvpress']} of kvpress" if row["kvpress"] else ""
        return " ".join((row["id"], row["title"], row["family"], *row["aliases"], press)).lower()

    def text(row: dict[str, Any]) -> str:
        return f"{names(row)} {' '.join((METHODS[row['id']].__doc__ or '').lower().split())}"

    def far(row: dict[str, Any]) -> int:
        called = words and words[0] in (row["id"].lower(), *(a.lower() for a in row["aliases"]))
        return 0 if called else 1 if all(word in names(row) for word in words) else 2

    found = [
        row
        for row in rows
        if family in (None, row["family"])
        and phase in (None, row["phase"])
        and training in (None, "yes" if row["training"] else "no")
        and all(word in text(row) for word in words)
    ]
    if not found:
        given = {"family": family, "phase": phase, "training": training, "search": search}
        asked = " ".join(f"--{name} {value}" for name, value in given.items() if value is not None)
        hint = _called(search or "") or "leave out one of the filters"
        raise InputError(f"no method is left by {asked}, expected at least one: {hint}")
    return sorted(found, key=far) if words else found


def _one_of(name: str, value: str | None, known: list[str]) -> str | None:
    """Return the known value that matches; InputError with the nearest one if none does."""
    import difflib

    from kvjax.base.errors import InputError

    known = list(dict.fromkeys(known))
    if value is None or value in known:
        return value
    near = difflib.get_close_matches(value, known, 1)
    hint = f"did you mean {near[0]}?" if near else "see `kvjax methods --help`"
    raise InputError(f"--{name} is {value!r}, expected one of {', '.join(known)}: {hint}")


def listing() -> list[dict[str, Any]]:
    """Every method as plain values: the fields of MethodInfo, url, aliases, takes_budget, hyper, press.

    hyper: hyper-parameters with their defaults. press: the fields of `kvjax.methods.Press`, or None.

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
            "press": None if (press := function.paper.kvpress) is None else press._asdict(),
            "hyper": {name: p.default for name, p in parameters.items() if p.default is not p.empty},
        }
        rows.append(row)
    return rows


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from kvjax.commands.methods_cards import about_family
    from kvjax.commands.terminal import BOX, console, pairs, print_text

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
    out.print(Text("Families", style="bold"))
    shown = dict.fromkeys(row["family"] for row in rows)
    out.print(pairs([(name, about_family(name)) for name in shown]), width=min(out.width, 140))
    out.print()
    print_text(out, f"{len(rows)} method{'s' * (len(rows) != 1)}. {_LEGEND}", style="dim")


def _details(row: dict[str, Any]) -> Text:
    """Say what the method decides, in which phase, its family and its paper."""
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
    if row["press"]:
        text.append(f" · {row['press']['name']} of kvpress")
        text.append(f" is {row['id']}:{row['press']['hyper']}" if row["press"]["hyper"] else "")
    return text
