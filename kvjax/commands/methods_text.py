"""Cards as text: printed by `kvjax methods ID`, and the pages of docs/methods/, one per family."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence

from kvjax.commands.methods_cards import Card, card
from kvjax.eval.report.cells import budget_label
from kvjax.eval.report.leaderboard import Line
from kvjax.methods import METHODS

_ACTS = {
    "prefill": "acts at the end of prompts",
    "decode": "acts in steps",
    "both": "acts at the end of prompts and in steps",
    "none": "changes nothing",
}


# --- parts that both forms have -------------------------------------------------------------------


def facts(found: Card) -> list[str]:
    """What it decides, when, what it needs, and how it compares with its paper and kvpress."""
    info = found.info
    words = [f"decides: {', '.join(info.verbs)}"] if info.verbs else []
    words.append(_ACTS[info.phase])
    if info.exact:
        equal = "the paper's equations" if info.exact == "equal" else "deviates from the paper, see below"
        words.append(equal)
    words += [f"in kvpress: {info.kvpress}"] if info.kvpress else []
    words += [f"also called {', '.join(found.aliases)}"] if found.aliases else []
    return words


def paper_of(found: Card) -> str:
    """The paper's title, with its arXiv id and year where it has one."""
    info = found.info
    return f"{info.title}, arXiv:{info.arxiv} ({info.year})" if info.arxiv else info.title


def company(found: Card) -> list[tuple[str, str]]:
    """What it chains with, and what not and why, as (heading, text)."""
    lines = [(f"Chains with {kind}", ", ".join(ids)) for kind, ids in found.chains.items()]
    return lines + [(f"Not with {', '.join(ids)}", reason) for reason, ids in found.refused.items()]


def score_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Lines of the leaderboard as cells of a table, scores and sizes in percent."""
    return [
        [
            budget_label(line.budget),
            line.protocol,
            f"{100 * line.mean:.0f}" + ("" if line.few else f" [{100 * line.low:.0f}–{100 * line.high:.0f}]"),
            f"{line.percent:.1f}%",
            " ".join(f"{task} {100 * mean:.0f}" for task, mean in line.tasks.items()),
        ]
        for line in lines
    ]


SCORE_HEADS = ("budget", "question", "score", "bytes kept", "by task")


# --- on a console ---------------------------------------------------------------------------------


def print_card(found: Card) -> None:
    """Prints a card."""
    from rich.table import Table
    from rich.text import Text

    from kvjax.commands.terminal import BOX, console, pairs, print_text

    out = console()
    out.print(Text(found.info.id, style="bold"), Text(f"· {found.info.family}", style="dim"))
    print_text(out, Text(paper_of(found)))
    print_text(out, Text(" · ".join(facts(found)), style="dim"))
    for text in (found.title, *_unwrapped(found.about)):
        out.print()
        print_text(out, Text(text))
    if found.deviations:
        out.print()
        print_text(out, Text.assemble(("Deviations: ", "bold"), found.deviations))
    out.print()
    out.print(Text(f"{found.call} is", style="bold"))
    out.print(Text(found.sentence), soft_wrap=True)
    if found.hyper:
        out.print()
        table = Table(box=BOX, show_edge=False, pad_edge=False, header_style="bold")
        for head in ("hyper-parameter", "default", "values"):
            table.add_column(head)
        for one in found.hyper:
            table.add_row(Text(one.name), Text(one.default or "must be given"), Text(one.values))
        out.print(table)
    if found.fit:
        out.print()
        print_text(out, Text.assemble(("Fitted to a model by ", "bold"), found.fit, _shipped(found)))
    if rows := company(found):
        out.print()
        width = min(out.width, 140)
        out.print(pairs([(head, text) for head, text in rows if head.startswith("Chains")]), width=width)
        for head, text in rows:
            if not head.startswith("Chains"):
                print_text(out, Text.assemble((f"{head}: ", "bold"), text))
    if found.lines:
        out.print()
        table = Table(box=BOX, show_edge=False, pad_edge=False, header_style="bold")
        for head in SCORE_HEADS:
            table.add_column(head)
        for row in score_rows(found.lines):
            table.add_row(*row)
        out.print(table)


def _shipped(found: Card) -> str:
    """For which models a fit comes with kvjax, behind the command that makes one for others."""
    return f"; for {' and '.join(found.fits)} it comes with kvjax" if found.fits else ""


def _unwrapped(text: str) -> list[str]:
    """Paragraphs, each in one line."""
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]


# --- pages ----------------------------------------------------------------------------------------


def families() -> dict[str, list[str]]:
    """The ids of methods by their families."""
    found: dict[str, list[str]] = {}
    for id, function in METHODS.items():
        found.setdefault(function.paper.family, []).append(id)
    return found


def page_of(family: str) -> str:
    """The page of docs/methods/ that has the cards of a family's methods."""
    return _page(family, [card(id) for id in families()[family]])


def pages() -> dict[str, str]:
    """The text of docs/methods/, by file name: one page per family, and README.md, which lists them."""
    return {f"{family}.md": page_of(family) for family in families()} | {"README.md": index()}


_MADE = "<!-- made by `python scripts/methods_page.py --write`: change the methods' functions instead -->"


def index() -> str:
    """The page that lists the families and their methods."""
    lines = ["# Methods by family", "", _MADE, ""]
    lines += [
        "A page per family has a card of every method: its sentence, its paper, what differs from it, its "
        "hyper-parameters and what it chains with. `kvjax methods ID` prints one card; `kvjax methods "
        "--family F`, `--phase P`, `--training no` and `--search TEXT` list fewer. "
        "[Names from elsewhere](../methods.md) are on a page of their own.",
        "",
        "| family | what its methods have in common | methods |",
        "|---|---|---|",
    ]
    for family, ids in families().items():
        named = ", ".join(f"[{id}]({family}.md#{id})" for id in ids)
        lines.append(f"| [{family}]({family}.md) | {' '.join(_abouts(ids))} | {named} |")
    return "\n".join(lines) + "\n"


def _abouts(ids: Iterable[str]) -> list[str]:
    """What the files of these methods say of themselves, each once."""
    modules = dict.fromkeys(METHODS[id].__module__ for id in ids)
    return [(sys.modules[name].__doc__ or "").strip().split("\n\n")[0].replace("\n", " ") for name in modules]


def _page(family: str, cards: list[Card]) -> str:
    ids = [found.info.id for found in cards]
    parts = [f"# {family}", _MADE, " ".join(_abouts(ids)), "[All families](README.md)"]
    for found in cards:
        parts += _section(found)
    return "\n\n".join(parts) + "\n"


def _section(found: Card) -> list[str]:
    info = found.info
    paper = paper_of(found)
    if info.arxiv:
        link = f"[arXiv:{info.arxiv}](https://arxiv.org/abs/{info.arxiv})"
        paper = paper.replace(f"arXiv:{info.arxiv}", link)
    parts = [f"## {info.id}", f"{paper}  \n*{' · '.join(facts(found))}*", _escaped(found.title)]
    parts += [_escaped(paragraph) for paragraph in _unwrapped(found.about)]
    if found.deviations:
        parts.append(f"**Deviations**: {_escaped(found.deviations)}")
    parts.append(f"```text\n# {found.call}\n{found.sentence}\n```")
    if found.hyper:
        rows = [
            (f"`{x.name}`", f"`{x.default}`" if x.default else "must be given", x.values) for x in found.hyper
        ]
        parts.append(_table(("hyper-parameter", "default", "values"), rows))
    if found.fit:
        parts.append(f"Fitted to a model by `{found.fit}`{_shipped(found)}.")
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
