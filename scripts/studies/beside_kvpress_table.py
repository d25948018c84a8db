"""The tables of docs/beside-kvpress.md: whether sets and answers are kvpress', and the seconds of both."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.docs_tables import DOCS
from scripts.studies.presses import PRESSES
from scripts.studies.runner import Data, Page

FILE, NONE = DOCS / "beside-kvpress.json", "none"
# Scores (relative to their size) and logits that lie nearer to each other are ties of float32.
SCORE_TIE, LOGIT_TIE = 1e-5, 1e-4
# Why sets differ by more than ties; what shows it stands in the data and on the page.
CAUSES = {
    "kvzip": "rounding: kvpress rounds the budget once for all heads, kvjax for every head",
    "non_causal": "padding: kvpress lets the padding of the last chunk take attention",
}

Rows = Sequence[Mapping[str, Any]]


def rows_of(press: str, found: Mapping[str, Any] | None = None) -> list[Mapping[str, Any]]:
    """The rows of a press, in the order of their contexts."""
    rows = (DATA.read() if found is None else found)["rows"]
    return [row for key, row in rows.items() if key.split()[0] == press]


def same_sets(rows: Rows) -> int:
    """On how many contexts every KV head of every layer keeps the same tokens."""
    return sum("only" not in row for row in rows)


def cause(press: str, rows: Rows) -> str:
    """Why sets differ; "" where they do not, and "unexplained" where nobody has found it."""
    other = [row for row in rows if "only" in row]
    if not other:
        return ""
    if press in CAUSES:
        return CAUSES[press]
    if all(row["score_gap"] is not None and row["score_gap"] < SCORE_TIE for row in other):
        most = max(row["score_gap"] for row in other)
        return f"float order: swapped scores are {most:.0e} of their size apart" if most else "equal scores"
    return "unexplained"


def parting(rows: Rows) -> str:
    """Which answers differ, and why."""
    sayings = []
    parts = [row for row in rows if "parts_at" in row]
    ties = [row for row in parts if row["logit_gap"] < LOGIT_TIE]
    sets = [row for row in parts if row not in ties and "only" in row]
    rest = len(parts) - len(ties) - len(sets)
    sayings += [f"{len(ties)} by a tie of logits"] if ties else []
    sayings += [f"{len(sets)} after another set"] if sets else []
    sayings += [f"{rest} unexplained"] if rest else []
    if failed := [row["error"] for row in rows if "error" in row]:
        sayings.append(f"{len(failed)} that kvpress cannot write ({failed[0].partition(':')[0]})")
    return ", ".join(sayings)


def equal_answers(rows: Rows) -> int:
    return sum("parts_at" not in row and "error" not in row for row in rows)


def sets_table() -> str:
    """Markdown: a row per press, on how many contexts sets and answers are equal, and why others are not."""
    head = ["press", "sentence here", "same sets", "KV heads", "why others differ", "same answers", "others"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, press in PRESSES.items():
        rows = rows_of(name)
        if not rows:
            continue
        heads = [sum(row["heads"][i] for row in rows) for i in (0, 1)]
        cells = [f"`{press.name}`", f"`{press.says()}`", f"{same_sets(rows)} of {len(rows)}"]
        cells += [f"{heads[0]} of {heads[1]}", cause(name, rows)]
        cells += [f"{equal_answers(rows)} of {len(rows)}", parting(rows)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def seconds_table() -> str:
    """Markdown: a row per press, the median seconds of both libraries for prompt and answer."""
    head = ["press", "prompt, kvjax", "kvpress", "ratio", "answer, kvjax", "kvpress", "ratio", "compile"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in (NONE, *PRESSES):
        rows = rows_of(name)
        if not rows:
            continue
        cells = [f"`{PRESSES[name].name}`" if name in PRESSES else "none"]
        for what in ("read_s", "answer_s"):
            timed = [row[what] for row in rows if row[what][1]]
            ours, theirs = (statistics.median(pair[i] for pair in timed) for i in (0, 1))
            cells += [f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"]
        cells.append(f"{sum(row['compile_s'] for row in rows):.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def setting() -> str:
    """A paragraph: the model, the prompts, the machine and the versions."""
    found = DATA.read()
    s, contexts = found["settings"], len({key.split()[1] for key in found["rows"]})
    machines = "; ".join(
        f"{one['processor']} ({one['machine']}), {one['cores']} core, Python {one['python']}, "
        + ", ".join(f"{name} {one[name]}" for name in ("kvjax", "jax", "torch", "transformers", "kvpress"))
        for one in found["runs"]
    )
    return (
        f"Model: `{s['model']}` in {s['dtype']} (fingerprint {s['fingerprint']}). {contexts} contexts of "
        f"RULER at {s['length']} tokens, seed {s['seed']}; a share of {s['removed']} is removed, "
        f"{s['new_tokens']} tokens are written. Machine: {machines}."
    )


DATA = Data(FILE, {"settings": {}, "runs": [], "rows": {}})
PAGE = Page("beside-kvpress.md", {"setting": setting, "sets": sets_table, "seconds": seconds_table})
