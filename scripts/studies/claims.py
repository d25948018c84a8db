"""Writes docs/claims.md: which claims of papers hold here.

From the leaderboard's data, claims_table.py and scripts/studies/surprises_table.py.

    python -m scripts.studies.claims            # prints the page
    python -m scripts.studies.claims --write    # writes it

A claim holds if it holds on every model of the leaderboard, and the 95% interval of the difference over all
models confirms it. Intervals treat the two means as independent; since both answered the same questions, they
are wider than necessary.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvjax.eval.report.cells import budget_label
from kvjax.eval.report.figures import signed
from kvjax.eval.report.leaderboard import Leaderboard, Line, read_leaderboard
from scripts.studies import authors_slots, longer_texts, memory_tokens, real_claims
from scripts.studies import board as real_board
from scripts.studies.claims_table import (
    CLAIMS,
    Better,
    Claim,
    Faster,
    Learned,
    Longer,
    Near,
    Untestable,
    other_bytes,
)
from scripts.studies.longer_texts import TRAINED
from scripts.studies.moved import MARK, MOVED, changes, marked
from scripts.studies.runner import Page, parser
from scripts.studies.surprises_table import BELOW_SINK_RECENT, SURPRISES

LONGER_TEXTS = (
    "Bits per byte of several models that were trained on rows of 256 bytes; they read a prompt, and then "
    "one byte at a time. At positions beyond 256 the full cache predicts worse and worse. "
    "Methods that rotate keys to positions that the model knows predict as well as within the rows. The "
    "first tokens do not help these small models: a window without them does as well. `python "
    "scripts/studies/longer_texts.py run --out runs/longer --seed N` adds a model."
)
YES, NO, UNCLEAR, MISSING, NONE = "yes", "no", "unclear", "not compared yet", "not testable"


class ClaimResult(NamedTuple):
    """The result of a check: the verdict, and the numbers behind it in words."""

    verdict: str
    numbers: str


class Difference(NamedTuple):
    """The difference of two methods over some budgets: mean and 95% interval, and the mean on every model."""

    mean: float
    low: float
    high: float
    models: tuple[float, ...]


Lines = dict[tuple[str, object, str], Line]


def by_cell(board: Leaderboard, *methods: str) -> Lines:
    """Lines by method, budget and protocol, over the models on which all these methods were compared."""
    return {(line.method, line.budget, line.protocol): line for line in board.lines(methods)}


def difference(pairs: list[tuple[Line, Line]]) -> Difference:
    """Average differences over pairs of lines, with the interval of a difference of independent means."""
    n = len(pairs)
    mean = math.fsum(a.mean - b.mean for a, b in pairs) / n
    below = math.hypot(*(x for a, b in pairs for x in (a.mean - a.low, b.high - b.mean))) / n
    above = math.hypot(*(x for a, b in pairs for x in (a.high - a.mean, b.mean - b.low))) / n
    models = [
        math.fsum(x - y for x, y in zip(each_a, each_b, strict=True)) / n
        for each_a, each_b in zip(
            zip(*(a.models for a, _ in pairs), strict=True), zip(*(b.models for _, b in pairs), strict=True),
            strict=True,
        )
    ]  # fmt: skip
    return Difference(mean, mean - below, mean + above, tuple(models))


def judged(found: Difference, least: float) -> str:
    """Whether a difference exceeds `least`, on every model and by its interval."""
    if found.low > least and all(x > least for x in found.models):
        return YES
    if found.high < least and all(x < least for x in found.models):
        return NO
    return UNCLEAR


def check(claim: Claim, board: Leaderboard) -> ClaimResult:
    """Check a claim against the leaderboard."""
    test = claim.test
    if isinstance(test, Untestable):
        return ClaimResult(NONE, test.why)
    if isinstance(test, Faster):
        speed = board.speed.get(claim.method)
        if speed is None:
            return ClaimResult(MISSING, "")
        return ClaimResult(YES if speed.prefill < 1 else NO, f"{speed.prefill:.2f}x the prefill of none")
    if isinstance(test, Learned):
        return learned(claim.method, test.within, memory_tokens.DATA.read())
    if isinstance(test, Longer):
        return longer(claim.method, list(longer_texts.DATA.read().values()))
    least = 0.0 if isinstance(test, Better) else -test.within
    lines = by_cell(board, claim.method, test.other)
    pairs = [(lines.get((claim.method, b, test.protocol)), _other(lines, test, b)) for b in test.budgets]
    whole = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(whole) < len(pairs):
        return ClaimResult(MISSING, _why_missing(claim.method))
    if any(line.few for pair in whole for line in pair):
        return ClaimResult(UNCLEAR, "too few samples for intervals")
    found = difference(whole)
    each = ", ".join(signed(100 * x) for x in found.models)
    numbers = f"{_points(found.mean, found.low, found.high)}; models {each}"
    held, theirs = (max(pair[side].percent for pair in whole) for side in (0, 1))
    if isinstance(test, Near) and test.percent is not None:
        numbers += f"; {held:.0f}% of the bytes"
        if held > test.percent:
            return ClaimResult(NO, numbers)
    elif said_bytes := other_bytes(held, theirs, test.other):
        numbers += f"; {held:.0f}% of the bytes{said_bytes}"
    return ClaimResult(judged(found, least), numbers)


def _points(mean: float, low: float, high: float) -> str:
    """Write a difference of shares with its interval, in percentage points."""
    return f"{signed(100 * mean, 1)} [{signed(100 * low, 1)}, {signed(100 * high, 1)}]"


def learned(method: str, within: float, rows: dict[str, Any]) -> ClaimResult:
    """Read the result of scripts/studies/memory_tokens.py for a method."""
    if method not in rows:
        return ClaimResult(MISSING, "no model was trained with it")
    theirs, runs = rows[method]["start"], [rows[method], *rows[method].get("seeds", {}).values()]
    each = [run["own"] for run in runs]
    mean = statistics.mean(ours["mean"] for ours in each) - theirs["mean"]

    def end(sign: int, a: str, b: str) -> float:
        """Find the outermost interval end over all models."""
        off = [math.hypot(ours["mean"] - ours[a], theirs["mean"] - theirs[b]) for ours in each]
        ends = [ours["mean"] - theirs["mean"] + sign * x for ours, x in zip(each, off, strict=True)]
        return sign * max(sign * x for x in ends)

    low, high = end(-1, "mean_low", "mean_high"), end(1, "mean_high", "mean_low")
    share = each[0]["kept_bytes"] / each[0]["full_bytes"]
    models = "one model" if len(each) == 1 else f"{len(each)} models"
    numbers = f"{_points(mean, low, high)}; {models}; {share:.0%} of the bytes"
    return ClaimResult(judged(Difference(mean, low, high, (mean,)), -within), numbers)


def longer(method: str, models: list[dict[str, Any]]) -> ClaimResult:
    """Read the result of scripts/studies/longer_texts.py for a method."""
    if not models:
        return ClaimResult(MISSING, "no model has read longer texts")

    def each(name: str, of: str) -> str:
        return ", ".join(f"{model[name][of]:.2f}" for model in models)

    differences = [model[method]["difference"] for model in models]
    numbers = f"bits per byte {each(method, 'own')}; full cache {each(method, 'full')}, and "
    numbers += f"{each('within', 'full')} within that length"
    if all(one["high"] < 0 for one in differences):
        return ClaimResult(YES, numbers)
    return ClaimResult(NO if all(one["low"] > 0 for one in differences) else UNCLEAR, numbers)


def _other(lines: Lines, test: Better | Near, budget: float | None) -> Line | None:
    """Take the lines of the method to compare with, at the same budget; without a budget if it has none."""
    return lines.get((test.other, budget, test.protocol)) or lines.get((test.other, None, test.protocol))


def _why_missing(method: str) -> str:
    from kvjax.commands.methods_cards import infos

    return "needs weights that were fitted to the model" if infos()[method].training else ""


def said(test: object) -> str:
    """Describe a test in words."""
    match test:
        case Better():
            return f"scores more than {test.other} ({_at(test.budgets)}, {test.protocol})"
        case Near():
            held = "" if test.percent is None else f", {test.percent:g}% of the bytes or less"
            where = f"{_at(test.budgets)}, {test.protocol}{held}"
            return f"within {100 * test.within:g} points of {test.other} ({where})"
        case Learned():
            points = f"within {100 * test.within:g} points of the full cache"
            return f"{points}, by a model that learned with it (contexts of 64 tokens)"
        case Longer():
            return f"likelier texts than with the full cache, beyond the {TRAINED} bytes of training"
        case Faster():
            return "a shorter prefill than without it"
    return "–"


def _at(budgets: Iterable[float | None]) -> str:
    named = [budget_label(b) for b in budgets if b is not None]
    return f"budget {', '.join(named)}" if named else "no budget"


def command(claim: Claim) -> str:
    """Write the command that reproduces the test."""
    test = claim.test
    if isinstance(test, Faster):
        return f"python -m scripts.studies.leaderboard speed --methods {claim.method} --out boards"
    if isinstance(test, Learned):
        return f"python -m scripts.studies.memory_tokens run --rows {claim.method} --out runs/memory"
    if isinstance(test, Longer):
        return "python -m scripts.studies.longer_texts run --out runs/longer"
    if not isinstance(test, Better | Near):
        return ""
    budgets = " ".join(f"{b:g}" for b in test.budgets if b is not None)
    methods = " ".join(dict.fromkeys([claim.method, *([] if test.other == "full" else [test.other])]))
    given = f" --budgets {budgets}" if budgets else ""
    return f"kvjax compare --methods {methods}{given} --protocol {test.protocol} --samples 100"


def _measured(claim: Claim) -> tuple[str, ...]:
    """List the methods whose measurements decide whether a claim holds."""
    if isinstance(claim.test, Untestable):
        return ()
    return (claim.method, *([claim.test.other] if isinstance(claim.test, Better | Near) else []))


def _told(claim: Claim, found: ClaimResult) -> str:
    """Write the numbers, marked if they are older than the method, with the claim's note."""
    before = any(method in MOVED for method in _measured(claim))
    numbers = f"{MARK} {found.numbers}" if before else found.numbers
    return ". ".join(part for part in (numbers, claim.note) if part) or "–"


def page(board: Leaderboard, real_lines: Sequence[real_claims.Line]) -> str:
    """Write the page's text. real_lines: those of the board of a real language model."""
    found = [(claim, check(claim, board)) for claim in CLAIMS]
    count = Counter(one.verdict for _, one in found)
    tested = sum(count[verdict] for verdict in (YES, NO, UNCLEAR))
    told = ", ".join(f"{count[v]} {v}" for v in (YES, NO, UNCLEAR, MISSING, NONE) if count[v])
    models = ", ".join(f"`{run.about['model']}`" for run in board.runs) or "none yet"
    lines = [
        "# Claims of papers",
        "",
        "<!-- made by `python -m scripts.studies.claims --write` -->",
        "",
        "What papers claim of their methods, each in one line, and whether it holds in direction on models "
        "and tasks that are not the paper's.",
        "",
        "## On SmolLM2-135M-Instruct",
        "",
        real_claims.section(real_lines),
        "",
        "### Whether it is the method that fails",
        "",
        authors_slots.section(),
        "",
        "## On models of four layers",
        "",
        f"On the tasks and models of the [leaderboard](leaderboard.md) ({models}). "
        "Numbers are differences in points, with 95% intervals over all models and the mean on each. *yes* "
        "and *no*: on every model, and beyond the interval. An answer is right here where all of its few "
        "tokens are, so that being within 5 points of full asks for more than papers' means over long "
        "answers do. Where the bytes of two methods differ by more than a tenth, both are shown: a *yes* may "
        f"then be due to memory. {len(found)} claims, {tested} of them tested: {told}.",
        "",
        "| method | claim | tested as | holds | found | command |",
        "|---|---|---|---|---|---|",
    ]
    for claim, one in found:
        how = f"`{command(claim)}`" if command(claim) else "–"
        row = (claim.method, claim.says, said(claim.test), f"**{one.verdict}**", _told(claim, one), how)
        lines.append("| " + " | ".join(row) + " |")
    lines += ["", changes(method for claim, _ in found for method in _measured(claim))]
    lines += ["", "## Texts longer than those of training", "", LONGER_TEXTS, "", longer_texts.table()]
    lines += ["", "## Below random, and why", ""]
    for surprise in SURPRISES:
        names = ", ".join(name + marked(name) for name in surprise.methods)
        lines += [f"* **{names}**. {surprise.found} `{surprise.command}`"]
    lines += ["", " ".join(BELOW_SINK_RECENT.split())]
    return "\n".join(lines) + "\n"


PAGE = Page("claims.md", {"": lambda: page(read_leaderboard(), real_board.at_1024())})

if __name__ == "__main__":
    PAGE.show(parser(__doc__).parse_args())
