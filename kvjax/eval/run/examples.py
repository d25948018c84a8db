"""Examples for the report: a question of every task, and the tokens that each method kept of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.eval.run.cellplan import ALWAYS, PlannedCell
from kvjax.eval.run.plan import ComparisonPlan, ContextBatch, arrays_of
from kvjax.eval.tasks.reader import joiner_of
from kvjax.eval.tasks.sample import Sample, Suite

# The shown parts of a prompt: its first and last tokens, and the needed spans with some tokens around them.
HEAD, TAIL, AROUND, SPANS = 48, 32, 12, 4


def kept_examples(
    plan: ComparisonPlan,
    batches: Sequence[ContextBatch],
    units: Mapping[str, Mapping[str, Any]],
    key: Callable[[str, int, PlannedCell], str],
) -> list[dict[str, Any]]:
    """Return the first question of every protocol and what each method kept of its prompt; units by key."""
    found = []
    for protocol in plan.protocols:
        batch = next(b for b in batches if b.protocol == protocol and b.number == 0)
        sample, rows = batch.rows[0][0], arrays_of(plan, [batch])[0]
        ids = [int(i) for i in rows.prompt[0][: rows.length[0]]]
        need = np.zeros(len(ids), bool)
        for a, b in sample.spans:
            need[a:b] = True
        for entry in plan.entries:
            unit = units[key(protocol, 0, entry)]
            row = next(r for r in unit["rows"] if r["id"] == sample.id)
            found.append(
                {
                    **{k: row[k] for k in ("method", "budget", "protocol", "task")},
                    **{k: row[k] for k in ("answer", "prediction", "score")},
                    "tokens": plan.suite.words(ids),
                    "kept": unit["share"],
                    "needed": [bool(x) for x in need],
                }
            )
    return found


def task_examples(
    plan: ComparisonPlan, batches: Sequence[ContextBatch], rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return every task's first question: prompt, right answer, and answers of the full cache and a method.

    The method is the first whose score differs from the full cache's, else the first; not a baseline.
    """
    said: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        said.setdefault((row["protocol"], row["id"]), []).append(row)
    found: dict[str, dict[str, Any]] = {}
    for batch in batches:
        for sample in (sample for row in batch.rows for sample in row):
            if sample.task not in found and (batch.protocol, sample.id) in said:
                answers = said[batch.protocol, sample.id]
                found[sample.task] = _example(plan.suite, batch.protocol, sample, answers)
    return list(found.values())


def _example(
    suite: Suite, protocol: str, sample: Sample, rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    words = suite.words(sample.context)
    joiner = joiner_of(words)
    full = [row for row in rows if row["method"] == "full"]
    others = [row for row in rows if row["method"] not in ALWAYS]
    differs = [row for row in others if full and row["score"] != full[0]["score"]]
    names = ("method", "budget", "prediction", "score")
    return {
        "task": sample.task,
        "protocol": protocol,
        "prompt": shortened(words, sample.spans, joiner),
        "question": joiner.join(suite.words(sample.question)),
        "answer": rows[0]["answer"],
        "said": [{name: row[name] for name in names} for row in (*full[:1], *(differs or others)[:1])],
    }


def shortened(
    words: Sequence[str], spans: Sequence[tuple[int, int]], joiner: str = ""
) -> list[dict[str, Any]]:
    """Shorten a prompt to pieces: {"text", "needed"}, or {"left_out"} with a number of tokens.

    >>> shortened(["a"] * 48 + ["b"] * 60 + ["c"] * 32, [], "")[1]
    {'left_out': 60}
    """
    needed, shown = np.zeros((2, len(words)), bool)
    shown[:HEAD] = True
    shown[max(0, len(words) - TAIL) :] = True
    for a, b in spans:
        needed[a:b] = True
    for a, b in sorted(spans)[:SPANS]:
        shown[max(0, a - AROUND) : b + AROUND] = True
    kind = np.where(shown, needed, 2)
    edges = [0, *(np.flatnonzero(np.diff(kind)) + 1), len(words)]
    pieces: list[dict[str, Any]] = []
    for a, b in zip(edges[:-1], edges[1:], strict=True):
        if not shown[a:b].all():
            pieces.append({"left_out": int(b - a)})
        elif b > a:
            end = joiner if b < len(words) else ""
            pieces.append({"text": joiner.join(words[a:b]) + end, "needed": bool(needed[a])})
    return pieces
