"""The tables of docs/beside-kvpress.md: whether kept sets and answers agree, and the seconds of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.docs_tables import DOCS
from scripts.studies.presses import PRESSES
from scripts.studies.runner import Data, Page

FILE, NONE = DOCS / "beside-kvpress.json", "none"
# Scores (relative to their size) and logits with smaller differences are ties in float32.
SCORE_TIE, LOGIT_TIE, TIES = 1e-5, 1e-4, "ties"
# Why kept sets differ by more than ties; the evidence is in the data and on the page.
CAUSES = {
    "kvzip": "rounding: kvpress rounds the budget once for all heads, kvjax for every head",
    "non_causal": "padding: kvpress lets the padding of the last chunk take attention",
}

Rows = Sequence[Mapping[str, Any]]


def rows_of(press: str, found: Mapping[str, Any] | None = None) -> list[Mapping[str, Any]]:
    """Take the rows of a press, in the order of their contexts."""
    rows = (DATA.read() if found is None else found)["rows"]
    return [row for key, row in rows.items() if key.split()[0] == press]


def same_sets(rows: Rows) -> int:
    """On how many contexts all KV heads of all layers keep the same tokens."""
    return sum("only" not in row for row in rows)


def cause(press: str, rows: Rows) -> str:
    """Why kept sets differ; "" if they do not, and "unexplained" if the cause is not known."""
    other = [row for row in rows if "only" in row]
    if not other:
        return ""
    if press in CAUSES:
        return CAUSES[press]
    if all(row["score_gap"] is not None and row["score_gap"] < SCORE_TIE for row in other):
        most = max(row["score_gap"] for row in other)
        apart = f"at most {most:.0e} of their size apart" if most else "are equal"
        return f"{TIES}: swapped scores {apart}{_in_double(other)}"
    return "unexplained"


def _in_double(rows: Rows) -> str:
    """Compute the difference of kvpress in float32 and in float64, for the rows that were checked."""
    checked = [row["double"] for row in rows if "double" in row]
    if not checked:
        return ""
    error = max(one["score_error"] for one in checked)
    same, heads = (sum(one["heads"][i] for one in checked) for i in (0, 1))
    return (
        f"; float32 moves kvpress' own scores by {error:.0e}, and its own sets in {heads - same} of {heads} "
        "KV heads there"
    )


def summary() -> str:
    """Write a sentence: how many presses keep the same tokens, how many but for ties, and which differ."""
    presses = {name: rows_of(name) for name, press in PRESSES.items() if press.multiple == 1}
    causes = {name: cause(name, rows) for name, rows in presses.items() if rows}
    same = [name for name, why in causes.items() if not why]
    ties = [name for name, why in causes.items() if why.startswith(TIES)]
    rest = [name for name in causes if name not in (*same, *ties)]
    swapped = {name: sum(row["only"][0] for row in presses[name] if "only" in row) for name in ties}
    kept = {name: sum(row["kept"][0] for row in presses[name]) for name in ties}

    def listed(names: Sequence[str]) -> str:
        return ", ".join(f"`{PRESSES[name].name}`" for name in names)

    tied = ", ".join(f"`{PRESSES[n].name}` ({swapped[n]} of {kept[n]} tokens)" for n in ties)
    return (
        f"Of {len(causes)} presses, **{len(same)}** keep exactly the same tokens in every KV head of every "
        f"layer on every context, and **{len(ties)}** do but for ties of scores: {tied}. "
        f"Others: {listed(rest)}."
    )


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
    """Markdown: per press, on how many contexts kept sets and answers agree, and why others do not."""
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
    """Markdown: per press, the least seconds of both libraries for prompt and answer."""
    head = ["press", "prompt, kvjax", "kvpress", "ratio", "answer, kvjax", "kvpress", "ratio", "compile"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in (NONE, *PRESSES):
        rows = rows_of(name)
        if not rows:
            continue
        cells = [f"`{PRESSES[name].name}`" if name in PRESSES else "none"]
        for what in ("read_s", "answer_s"):
            timed = [row[what] for row in rows if row[what][1]]
            ours, theirs = (min(pair[i] for pair in timed) for i in (0, 1))
            cells += [f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"]
        cells.append(f"{max(row['compile_s'] for row in rows):.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def setting() -> str:
    """Write a paragraph: the model, the prompts, the machine and the versions."""
    found = DATA.read()
    s, each = found["settings"], Counter(key.split()[0] for key in found["rows"])
    least, most = min(each.values()), max(each.values())
    contexts = f"{most} contexts" if least == most else f"{least} to {most} contexts of a press"
    machines = "; ".join(
        f"{one['processor']} ({one['machine']}), {one['cores']} core, Python {one['python']}, "
        + ", ".join(f"{name} {one[name]}" for name in ("kvjax", "jax", "torch", "transformers", "kvpress"))
        for one in found["runs"]
    )
    return (
        f"Model: `{s['model']}` in {s['dtype']} (fingerprint {s['fingerprint']}), {contexts}, of "
        f"RULER at {s['length']} tokens, seed {s['seed']}; a share of {s['removed']} is removed, "
        f"{s['new_tokens']} tokens are written. Machine: {machines}."
    )


DATA = Data(FILE, {"settings": {}, "runs": [], "rows": {}})
PAGE = Page(
    "beside-kvpress.md",
    {"setting": setting, "summary": summary, "sets": sets_table, "seconds": seconds_table},
)
