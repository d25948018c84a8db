"""Which claims of papers hold on a real language model: a part of docs/claims.md, from the board's data.

A method is better than another if right answers are likelier, on contexts that both read. It is within 5% of
the full cache if the tokens of right answers are at least 0.95 times as likely, in the geometric mean (a loss
of at most 0.051 nats per token).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax.eval.report.cells import budget_label
from kvjax.eval.report.paired import Difference, Scores, difference
from scripts.studies.claims_table import (
    AGNOSTIC,
    AWARE,
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

YES, NO, UNCLEAR, MISSING, NONE = "yes", "no", "unclear", "not compared yet", "not testable"
BUDGETS = (0.5, 0.25)
# On the board, "aware" protects the tokens of a question from eviction.
PROTOCOLS = {AWARE: "aware", AGNOSTIC: "agnostic"}
ABOUT = """\
The model has 135 million parameters and 30 layers; contexts are those of [the board](real-model.md), 1024
tokens of RULER's tasks. How a claim is tested:

* *Found* is by how many nats per token right answers are likelier under the method than under what it is
  compared with, paired by context, with the 95% interval. *yes*, *no*: all of the interval is on that side.
* `agnostic`: the question is read after the cache is compressed. `aware`: before, and its tokens stay.
* Budgets are 0.5 and 0.25, where 0.25 stands for smaller ones. Bytes are shares of a float32 cache; codes
  take about twice these shares of a bfloat16 cache."""
_WHY = {
    Learned: "the model would have to be trained with memory tokens",
    Longer: "contexts here are shorter than those that the model was trained on",
    Faster: "seconds are not what this board measures",
}
Line = dict[str, Any]


class ClaimResult(NamedTuple):
    """The verdict, how it was tested, and the numbers behind it in words."""

    verdict: str
    tested: str
    numbers: str


def check(claim: Claim, lines: Sequence[Line]) -> ClaimResult:
    """Check a claim against the board. lines: of one length, from runs that asked the same tasks."""
    test = claim.test
    if isinstance(test, Untestable):
        return ClaimResult(NONE, "–", test.why)
    if not isinstance(test, Better | Near):
        return ClaimResult(NONE, "–", _WHY[type(test)])
    protocol, budgets = PROTOCOLS[test.protocol], budgets_of(test.budgets)
    mine = [line for line in lines if line["protocol"] == protocol]
    tasks = {line["task"] for line in mine}
    ours, theirs = (losses(mine, method, budgets, tasks) for method in (claim.method, test.other))
    least = 0.0 if isinstance(test, Better) else math.log1p(-test.within)
    if isinstance(test, Better):
        tested = f"likelier answers than {test.other}'s"
    else:
        tested = f"at least {1 - test.within:.3g} times as likely as {_whose(test.other)}"
    named = ", ".join(budget_label(b) for b in budgets if b is not None)
    tested += f" ({'budget ' + named if named else 'no budget'}, {protocol})"
    if ours is None or theirs is None:
        return ClaimResult(MISSING, tested, "–")
    found = difference(theirs, ours, shares=False)
    if found is None or found.low is None:
        return ClaimResult(UNCLEAR, tested, "too few contexts for an interval")
    percent, other = (_kept(mine, method, budgets) for method in (claim.method, test.other))
    numbers = f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}] nats; {percent:.0f}% of the bytes"
    numbers += other_bytes(percent, other, test.other)
    if isinstance(test, Near) and test.percent is not None and percent > test.percent:
        return ClaimResult(NO, f"{tested}, {test.percent:g}% of the bytes or less", numbers)
    return ClaimResult(judged(found, least), tested, numbers)


def _kept(lines: Iterable[Line], method: str, budgets: Sequence[float | None]) -> float:
    """Return the largest share of the full cache's bytes that a method kept at these budgets, in percent."""
    return 100 * max(x["kept"] for x in lines if x["method"] == method and x["budget"] in {*budgets, None})


def judged(found: Difference, least: float) -> str:
    """Whether a difference exceeds `least` by its interval."""
    assert found.low is not None and found.high is not None
    return YES if found.low > least else NO if found.high < least else UNCLEAR


def budgets_of(claimed: Iterable[float | None]) -> tuple[float | None, ...]:
    """List the board's budgets at which a claim is tested.

    >>> budgets_of((0.5, 0.25, 0.125)), budgets_of((0.125,)), budgets_of((None,))
    ((0.5, 0.25), (0.25,), (None,))
    """
    claimed = tuple(claimed)
    return tuple(b for b in claimed if b is None or b in BUDGETS) or (min(BUDGETS),)


def losses(
    lines: Iterable[Line], method: str, budgets: Sequence[float | None], tasks: set[str]
) -> Scores | None:
    """Nats per token of right answers by task and context, a mean over budgets.

    A method without budgets, such as the full cache, has one value for all of them. None where a budget or a
    task is missing.
    """
    each = {}
    for line in (line for line in lines if line["method"] == method):
        for i, nll in enumerate(line["nll"]):
            each.setdefault(line["budget"], {})[line["task"], f"{line['seed']}-{i:04}"] = nll
    if set(each) == {None}:
        budgets = (None,)
    if not tasks or any({task for task, _ in each.get(budget, {})} != tasks for budget in budgets):
        return None
    shared = set.intersection(*({*each[budget]} for budget in budgets))
    return {key: float(np.mean([each[budget][key] for budget in budgets])) for key in shared}


def section(lines: Sequence[Line]) -> str:
    """Write the section's text: what was measured, how many claims hold, and the table."""
    found = [(claim, check(claim, lines)) for claim in CLAIMS]
    count = Counter(one.verdict for _, one in found)
    verdicts = (YES, NO, UNCLEAR, MISSING, NONE)
    compared = sum(count[v] for v in (YES, NO, UNCLEAR))
    told = (
        f"Of {len(found)} claims {compared} were compared: **{count[YES]} hold**, **{count[NO]} do not**, "
        f"{count[UNCLEAR]} are unclear. {count[MISSING]} are not compared yet (`python -m scripts.eval --gin "
        f"board-1024 --out DIR --resume` does so), and {count[NONE]} cannot be tested here."
    )
    rows = {verdict: [] for verdict in verdicts}
    for claim, one in found:
        row = f"| {claim.method} | {claim.says} | {one.tested} | **{one.verdict}** | {one.numbers} |"
        rows[one.verdict].append(row)
    head = ["| method | claim | tested as | holds | found |", "|---|---|---|---|---|"]
    rest = f"<details><summary>The {count[MISSING] + count[NONE]} claims without a comparison</summary>"
    lines = [told, "", ABOUT, "", *head, *rows[YES], *rows[NO], *rows[UNCLEAR], "", rest, ""]
    return "\n".join([*lines, *head, *rows[MISSING], *rows[NONE], "", "</details>"])


def _whose(other: str) -> str:
    return "the full cache's" if other == "full" else f"{other}'s"
