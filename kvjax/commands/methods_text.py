"""Cards as text, printed by `kvjax methods ID`."""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.commands.methods_cards import Card
from kvjax.eval.report.cells import budget_label
from kvjax.eval.report.leaderboard import Line

_ACTS = {
    "prefill": "acts at the end of prompts",
    "decode": "acts in steps",
    "both": "acts at the end of prompts and in steps",
    "none": "changes nothing",
}


def facts(found: Card) -> list[str]:
    """Say what the method decides, in which phase, whether it equals its paper, and its other names."""
    info = found.info
    words = [f"decides: {', '.join(info.verbs)}"] if info.verbs else []
    words.append(_ACTS[info.phase])
    if info.exact:
        equal = "the paper's equations" if info.exact == "equal" else "deviates from the paper, see below"
        words.append(equal)
    words += [f"also called {', '.join(found.aliases)}"] if found.aliases else []
    return words


def paper_of(found: Card) -> str:
    """Return the paper's title, with its arXiv id and year if it has them."""
    info = found.info
    return f"{info.title}, arXiv:{info.arxiv} ({info.year})" if info.arxiv else info.title


def in_kvpress(found: Card) -> str:
    """Name its class of kvpress, its text here, and whether both keep the same tokens; "" without one."""
    if found.press is None:
        return ""
    own = f"{found.info.id}:{found.press.hyper}" if found.press.hyper else found.info.id
    same = found.press.same
    return f"{found.press.name} is {own} here. Same scores and same tokens? {same[0].upper()}{same[1:]}."


def company(found: Card) -> list[tuple[str, str]]:
    """Return the methods that it chains with, by kind, and those that it refuses, as (heading, text)."""
    lines = [(f"Chains with {kind}", ", ".join(ids)) for kind, ids in found.chains.items()]
    others = [other for ids in found.refused.values() for other in ids]
    if not others:
        return lines
    said = f'`kvjax explain "{found.info.id} + {others[0]}"` prints the reason'
    return [*lines, ("Not with", f"{', '.join(others)} ({said})")]


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
SCORES_ARE = "Right answers on the leaderboard's small models, in percent, with 95% intervals:"


def print_card(found: Card) -> None:
    """Print a card."""
    from rich.table import Table
    from rich.text import Text

    from kvjax.commands.terminal import BOX, console, pairs, print_text

    out = console()
    out.print(Text(found.info.id, style="bold"), Text(f"· {found.info.family}", style="dim"))
    print_text(out, Text(paper_of(found)))
    print_text(out, Text(" · ".join(facts(found)), style="dim"))
    for text in (found.title, *unwrapped(found.about)):
        out.print()
        print_text(out, Text(text))
    if found.deviations:
        out.print()
        print_text(out, Text.assemble(("Deviations: ", "bold"), found.deviations))
    if found.codes:
        out.print()
        print_text(out, Text(found.codes))
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
        print_text(out, Text.assemble(("Fitted to a model by ", "bold"), found.fit, shipped(found)))
    if said := in_kvpress(found):
        out.print()
        print_text(out, Text.assemble(("In kvpress: ", "bold"), said))
    if rows := company(found):
        out.print()
        width = min(out.width, 140)
        out.print(pairs(rows), width=width)
    if found.lines:
        out.print()
        print_text(out, Text(SCORES_ARE))
        table = Table(box=BOX, show_edge=False, pad_edge=False, header_style="bold")
        for head in SCORE_HEADS:
            table.add_column(head)
        for row in score_rows(found.lines):
            table.add_row(*row)
        out.print(table)


def shipped(found: Card) -> str:
    """Append the models for which fitted arrays ship with kvjax to the command that fits others."""
    return f"; for {' and '.join(found.fits)} it comes with kvjax" if found.fits else ""


def unwrapped(text: str) -> list[str]:
    """Paragraphs, each in one line."""
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]
