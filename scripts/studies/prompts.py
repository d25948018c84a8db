"""Prompt compression beside eviction at equal kept tokens, on a real language model.

    kvjax get smollm2-135m
    python -m scripts.studies.prompts run      # goes on with the rows that docs/prompts.json lacks
    python -m scripts.studies.prompts          # prints the table
    python -m scripts.studies.prompts --write  # writes it into docs/how-to/shorten.md

Contexts are those of RULER's tasks at 1024 tokens. A prompt is shortened inside the chat template and read
with the full cache; an evicting method reads it whole. Measured is -log p of the tokens of right answers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax.eval.report.paired import Scores, difference
from scripts.docs_tables import DOCS
from scripts.studies.runner import Data, Page, parser, progress

DATA = Data(DOCS / "prompts.json")
MODEL, LENGTH, CONTEXTS = "smollm2-135m", 1024, 6
TASKS = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multiquery", "vt")


class Row(NamedTuple):
    """What is done to a prompt: a compressor's name or a method's, and how much it keeps.

    asked: whether the question is known when tokens leave.
    """

    name: str
    keep: float
    asked: bool
    shortens: bool

    @property
    def key(self) -> str:
        return f"{self.name} {self.keep:g}{' asked' if self.asked and not self.shortens else ''}"


ROWS = (
    Row("full", 1.0, False, False),
    *(
        row
        for keep in (0.5, 0.25)
        for row in (
            Row("llmlingua", keep, False, True),
            Row("longllmlingua", keep, True, True),
            Row("cpc", keep, True, True),
            Row("random", keep, False, False),
            Row("snapkv", keep, False, False),
            Row("snapkv", keep, True, False),
            Row("tova", keep, False, False),
            Row("kvzip", keep, False, False),
        )
    ),
)


def run() -> None:
    """Measures the rows that are not there yet."""
    import kvjax
    from kvjax.eval.run.scanned import scanned
    from kvjax.eval.tasks.suite import make_suite

    model = kvjax.load(MODEL)
    deep = scanned(model)
    suite = make_suite(model, TASKS, length=LENGTH, gold=True)
    there = DATA.read()
    for key in progress(row.key for row in ROWS if row.key not in there):
        row = next(row for row in ROWS if row.key == key)
        found = {task: _measure(deep, suite, task, row) for task in TASKS}
        DATA.change(lambda data, key=key, found=found: data.update({key: found}))


def _measure(model: Any, suite: Any, task: str, row: Row) -> dict[str, Any]:
    """-log p per token of the right answers in a task's contexts, the share of tokens kept, and seconds."""
    import kvjax

    samples = [suite.sample(task, index) for index in range(CONTEXTS)]
    asked = [suite.draft(task, index).question for index in range(CONTEXTS)]
    contexts, method, began = [list(one.context) for one in samples], None, time.perf_counter()
    if row.shortens:
        contexts = [_shortened(model, suite, ids, q, row) for ids, q in zip(contexts, asked, strict=True)]
    elif row.name != "full":
        method = f"{row.name}(budget={row.keep:g})"
    seconds = (time.perf_counter() - began) / CONTEXTS
    texts = [[*c, *one.question, *one.answer] for c, one in zip(contexts, samples, strict=True)]
    read = [
        len(c) + (len(one.question) if row.asked or method is None else 0)
        for c, one in zip(contexts, samples, strict=True)
    ]
    found = kvjax.likelihood(model, texts, method=method, context=read)
    nll = []
    for i, (context, one) in enumerate(zip(contexts, samples, strict=True)):
        at = len(context) + len(one.question)
        places = [at + p for start, end in one.parts for p in range(start, end)]
        nll.append(round(-float(found.logprobs[i, places].mean()), 4))
    whole = sum(len(one.context) for one in samples)
    kept = row.keep if method else sum(map(len, contexts)) / whole
    return {"nll": nll, "kept": round(kept, 3), "seconds": round(seconds, 2)}


def _shortened(model: Any, suite: Any, ids: Sequence[int], question: str, row: Row) -> list[int]:
    """A context's ids, shortened between what the chat template puts around it."""
    import kvjax

    before = model.tokenizer.encode(suite.chat[0], add_special_tokens=False).ids
    assert [*ids[: len(before)]] == before
    text = model.tokenizer.decode([*ids[len(before) :]], skip_special_tokens=False)
    # The template's own tokens stay, so the text keeps as many fewer.
    keep = max(0.01, (row.keep * len(ids) - len(before)) / (len(ids) - len(before)))
    question = question if row.asked else ""
    short = kvjax.shorten(model, text, keep=min(1.0, keep), question=question, by=row.name)
    return [*before, *model.tokenizer.encode(short.text, add_special_tokens=False).ids]


def table() -> str:
    """How much less likely right answers are than with the whole prompt and the full cache."""
    there = DATA.read()
    if "full" not in {key.split()[0] for key in there}:
        return "Not measured yet."
    full = _scores(there["full 1"])
    head = "| what keeps | kept, % | knows the question | -log p, above the whole prompt's |"
    out = [head, "|---|--:|---|--:|"]
    for row in ROWS[1:]:
        if row.key in there:
            lost = difference(_scores(there[row.key]), full, shares=False)
            assert lost is not None
            kept = 100 * np.mean([one["kept"] for one in there[row.key].values()])
            kind = "prompt" if row.shortens else "cache"
            knows = "yes" if row.asked else "no"
            interval = "" if lost.low is None else f" [{lost.low:+.2f}, {lost.high:+.2f}]"
            out.append(f"| {row.name} ({kind}) | {kept:.0f} | {knows} | {lost.mean:+.2f}{interval} |")
    return "\n".join(out)


def _scores(tasks: dict[str, Any]) -> Scores:
    return {(task, f"{i:04}"): x for task, one in tasks.items() for i, x in enumerate(one["nll"])}


PAGE = Page("how-to/shorten.md", {"shortened": table})

if __name__ == "__main__":
    args = parser(__doc__, ("run",)).parse_args()
    if args.what == "run":
        run()
    else:
        PAGE.show(args)
