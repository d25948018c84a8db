"""docs/leaderboard.md, and pictures, from the leaderboard's data; `leaderboard.py` writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvjax.eval.report.cells import NominalBudget, budget_label
from kvjax.eval.report.comparison_table import PROTOCOLS
from kvjax.eval.report.leaderboard import Leaderboard, Line, Speed
from kvjax.methods import METHODS
from scripts.studies.leaderboard_picture import picture
from scripts.studies.memory_tokens import table as memory_tokens
from scripts.studies.moved import changes, marked

# How much more than its budget a method may keep to count as the best of its family there.
ROOM = 1.1
# The largest allowed ratio of prefill times with and without a method (an aim, unless it makes further
# passes).
MOST_PREFILL = 1.5
BASELINES = ("random", "sink-recent")
MADE = "<!-- made by `python -m scripts.studies.leaderboard --write` from leaderboard.json -->"


def families(lines: Sequence[Line]) -> dict[str, list[str]]:
    """List the compared methods by family, in the order of the library."""
    compared = {line.method for line in lines}
    found: dict[str, list[str]] = {}
    for id, function in METHODS.items():
        if id in compared:
            found.setdefault(function.paper.family, []).append(id)
    return found


def page(board: Leaderboard) -> str:
    """Write the page's text."""
    if not board.runs:
        empty = "Nothing was compared yet: `python -m scripts.studies.leaderboard run`."
        return f"# Leaderboard\n\n{MADE}\n\n{empty}\n"
    lines = board.lines()
    protocols = list(dict.fromkeys(line.protocol for line in lines))
    parts = ["# Leaderboard", MADE, _about(board), _reading(), _on_fewer(board)]
    for protocol in protocols:
        mine = [line for line in lines if line.protocol == protocol]
        parts += [
            f"## {protocol}: {PROTOCOLS.get(protocol, '')}",
            table(mine, board.speed),
            changes(line.method for line in mine),
            below_baselines(mine),
        ]
    parts += [_learned_together(), memory_tokens()]
    return "\n\n".join(part for part in parts if part) + "\n"


def pictures(board: Leaderboard) -> dict[str, bytes]:
    """Draw the pictures by file name, one per protocol."""
    lines = board.lines()
    return {
        f"leaderboard-{protocol}.svg": picture([x for x in lines if x.protocol == protocol], families(lines))
        for protocol in dict.fromkeys(line.protocol for line in lines)
    }


def _about(board: Leaderboard) -> str:
    about = board.runs[0].about
    models = ", ".join(f"`{run.about['model']}`" for run in board.runs)
    many = f"{len(board.runs)} models ({models})" if len(board.runs) > 1 else f"one model ({models})"
    text = (
        "How many questions small models answer right when a method compresses their cache, and the bytes "
        "that it takes then. Methods need no fit, or were fitted to the model. All read the same "
        f"{_contexts(board)} of about {about['length']} tokens per protocol, on {many}.\n\n"
        f"* **Measured on** {about['device']}, {about['dtype']}, revision {about['git_revision']}. "
        f"`{about['command']}` runs one of the models; `scripts/studies/leaderboard.py` has all commands."
    )
    if board.timed:
        timed = board.timed
        text += (
            f"\n* **Prefill**: seconds of {timed['rows']} prompts of {timed['tokens']} tokens at a budget of "
            f"{timed['budget']}, over those without a method, the least of {timed['rounds']} alternating "
            f"rounds. More than {MOST_PREFILL:g} times: {_slow(board.speed)}. Some do more than read "
            "a prompt once: `kvzip`, `restorekv` and `kvcompose` read it again, `kvgrad` also computes "
            "gradients, `ape` and `lm-infinite` attend to its parts one by one, `keyformer` and "
            "`attention-gate` compute a second attention, and `pqcache` clusters keys."
            f"\n* **Decode**: tokens per second of {timed['steps']} steps after these prompts, over those "
            "without a method."
        )
    return text


def _contexts(board: Leaderboard) -> str:
    """How many contexts there were, and which models have fewer."""
    samples, *others = sorted({run.about["samples"] for run in board.runs}, reverse=True)
    fewer = [f"{count} of them on {' and '.join(_models(board, count))}" for count in others]
    return f"{samples} contexts ({', '.join(fewer)})" if fewer else f"{samples} contexts"


def _models(board: Leaderboard, samples: int) -> list[str]:
    return [f"`{run.about['model']}`" for run in board.runs if run.about["samples"] == samples]


def _slow(speed: Mapping[str, Speed]) -> str:
    """List the methods whose prefill time exceeds the aim, the slowest first."""
    slow = sorted((x for x in speed.items() if x[1].prefill > MOST_PREFILL), key=lambda x: -x[1].prefill)
    return ", ".join(f"{name} {fast.prefill:.2f}" for name, fast in slow) or "none"


def _reading() -> str:
    return (
        "A cell has the mean score over all tasks in percent, its 95% interval where samples suffice, and "
        "the bytes that were measured, in percent of the full cache in float32, of which codes take about "
        "half the share that they take of one in bfloat16. **Bold**: the best of its family in "
        f"that column, of those that hold at most {ROOM:g} times the budget's bytes. `kvjax methods ID` "
        "prints a method's card, with its scores by task. "
        "`python -m scripts.studies.leaderboard --pictures DIR` draws scores against bytes, by family."
    )


def _on_fewer(board: Leaderboard) -> str:
    """Which methods were not compared on every model."""
    on: dict[str, list[str]] = {}
    for run in board.runs:
        for method in {cell.method: None for cell in run.cells}:
            on.setdefault(method, []).append(f"`{run.about['model']}`")
    fewer: dict[str, list[str]] = {}
    for method, models in on.items():
        if len(models) < len(board.runs):
            fewer.setdefault(", ".join(models), []).append(method)
    return " ".join(f"On {models} alone: {', '.join(methods)}." for models, methods in fewer.items())


def _learned_together() -> str:
    return (
        "## Models that learned with their method\n\n"
        "Memory tokens that are fitted beside a model that stays as it is (`gisting`, `loma`, `ccm`, "
        "`ccm-merge` above) answer no question about 512 tokens: where such fits read contexts at all, they "
        "have some words of answers right (`kvjax methods gisting`). Most authors train the model with "
        "them. Here models went on from `recall-tiny` so, and were asked `get` behind "
        "contexts of 64 tokens ([training.md](training.md#under-a-method) has the commands)."
    )


def best(lines: Sequence[Line], names: Sequence[str]) -> dict[NominalBudget, str]:
    """Find the best methods at every budget, among those that keep about as much as the budget says."""
    found: dict[NominalBudget, Line] = {}
    for line in lines:
        fits = not isinstance(line.budget, float) or line.percent <= 100 * ROOM * line.budget
        known = found.get(line.budget)
        if line.method in names and fits:
            if known is None or (line.mean, -line.percent) > (known.mean, -known.percent):
                found[line.budget] = line
    return {budget: line.method for budget, line in found.items()}


def table(lines: Sequence[Line], speed: Mapping[str, Speed]) -> str:
    """Write a table with one row per method, one column per budget, and sections by family."""
    budgets = sorted({x.budget for x in lines if x.budget is not None}, reverse=True)
    columns: list[NominalBudget] = [*budgets, *([None] if any(x.budget is None for x in lines) else [])]
    heads = ["method", *("no budget" if b is None else f"budget {budget_label(b)}" for b in columns)]
    heads += ["prefill", "decode"] if speed else []
    rows = [_row(heads), "|" + "---|" * len(heads)]
    for family, names in families(lines).items():
        rows.append(_row([f"*{family}*", *[""] * (len(heads) - 1)]))
        winners = best(lines, names)
        for name in names:
            mine = {line.budget: line for line in lines if line.method == name}
            cells = [_cell(mine.get(b), winners.get(b) == name) for b in columns]
            fast = speed.get(name)
            times = [f"{fast.prefill:.2f}x", f"{fast.decode:.2f}x"] if fast else ["", ""]
            rows.append(_row([f"{name}{marked(name)}", *cells, *(times if speed else [])]))
    return "\n".join(rows)


def _cell(line: Line | None, winner: bool) -> str:
    if line is None:
        return ""
    score = f"{100 * line.mean:.0f}"
    ends = "" if line.few else f" [{100 * line.low:.0f}–{100 * line.high:.0f}]"
    return f"{f'**{score}**' if winner else score}{ends} · {line.percent:.1f}%"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def below_baselines(lines: Sequence[Line]) -> str:
    """Which methods are below a baseline that keeps as many tokens, with disjoint intervals."""
    found = []
    for baseline in BASELINES:
        of_budget = {line.budget: line for line in lines if line.method == baseline}
        worse = [
            f"{line.method} at {budget_label(line.budget)}"
            for line in lines
            if (other := of_budget.get(line.budget)) is not None
            and line.method not in BASELINES
            and not line.few
            and line.high < other.low
        ]
        found.append(f"Below {baseline}, intervals apart: {', '.join(worse) or 'none'}.")
    return " ".join(found)
