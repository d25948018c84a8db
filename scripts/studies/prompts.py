"""Prompt compression beside eviction at equal kept tokens, on a real language model.

    kvjax get smollm2-135m
    python -m scripts.studies.prompts run      # goes on with the rows that docs/prompts.json lacks
    python -m scripts.studies.prompts          # prints the table
    python -m scripts.studies.prompts --write  # writes it into docs/how-to/shorten.md

Contexts are those of the board's first seed (scripts/studies/board.py). A prompt is shortened inside the chat
template and read with the full cache; results of evicting methods on the same contexts are in the board's
data. Measured is -log p of the tokens of right answers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.eval.report.paired import difference
from scripts.docs_tables import DOCS
from scripts.studies import board
from scripts.studies.codes import prose
from scripts.studies.runner import Data, Page, parser, progress

DATA = Data(DOCS / "prompts.json")
MODEL, LENGTH, CONTEXTS, SEED = "smollm2-135m", 1024, 6, 0
TASKS = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multiquery")
ASKING = {"llmlingua": False, "llmlingua2": False, "longllmlingua": True, "cpc": True}
# Texts of prose to which LLMLingua-2's classifier is fitted, and their tokens.
FITTED = (16, 512)
KEEP = (0.5, 0.25)
EVICTING = ("random", "snapkv", "tova", "keydiff", "kvzip")


def run() -> None:
    """Measure the missing rows."""
    import kvjax
    from kvjax.eval.run.scanned import scanned
    from kvjax.eval.tasks.suite import make_suite

    model = scanned(kvjax.load(MODEL))
    suite = make_suite(model, TASKS, length=LENGTH, seed=SEED, gold=True)
    there = DATA.read()
    rows = {f"{name} {keep:g}": (name, keep) for keep in KEEP for name in ASKING}
    missing = {key: row for key, row in rows.items() if key not in there}
    more = {}
    if any(name == "llmlingua2" for name, _ in missing.values()):
        texts = [model.tokenizer.decode(ids) for ids in prose(model, *FITTED)]
        more["llmlingua2"] = {"classifier": kvjax.fit_classifier(model, texts)}
    for key, (name, keep) in progress(list(missing.items())):
        found = {task: _measure(model, suite, task, name, keep, **more.get(name, {})) for task in TASKS}
        DATA.change(lambda data, key=key, found=found: data.update({key: found}))


def _measure(model: Any, suite: Any, task: str, name: str, keep: float, **options: Any) -> dict[str, Any]:
    """-log p per token of the right answers in a task's contexts, the share of tokens kept, and seconds."""
    import kvjax

    samples = [suite.sample(task, index) for index in range(CONTEXTS)]
    asked = [suite.draft(task, index).question for index in range(CONTEXTS)]
    began = time.perf_counter()
    contexts = [
        _shortened(model, suite, one.context, question if ASKING[name] else "", name, keep, **options)
        for one, question in zip(samples, asked, strict=True)
    ]
    seconds = (time.perf_counter() - began) / CONTEXTS
    texts = [[*c, *one.question, *one.answer] for c, one in zip(contexts, samples, strict=True)]
    read = [len(c) + len(one.question) for c, one in zip(contexts, samples, strict=True)]
    found = kvjax.likelihood(model, texts, context=read)
    nll = []
    for i, (at, one) in enumerate(zip(read, samples, strict=True)):
        places = [at + p for start, end in one.parts for p in range(start, end)]
        nll.append(round(-float(found.logprobs[i, places].mean()), 4))
    kept = sum(map(len, contexts)) / sum(len(one.context) for one in samples)
    return {"nll": nll, "kept": round(kept, 3), "seconds": round(seconds, 2)}


def _shortened(
    model: Any, suite: Any, ids: Sequence[int], question: str, name: str, keep: float, **options: Any
) -> list[int]:
    """Shorten a context's ids after the tokens that the chat template puts before it."""
    import kvjax

    before = model.tokenizer.encode(suite.chat[0], add_special_tokens=False).ids
    assert [*ids[: len(before)]] == before
    text = model.tokenizer.decode([*ids[len(before) :]], skip_special_tokens=False)
    # The template's own tokens stay, so the text keeps fewer tokens by their number.
    share = max(0.01, (keep * len(ids) - len(before)) / (len(ids) - len(before)))
    short = kvjax.shorten(model, text, keep=share, question=question, by=name, **options)
    return [*before, *model.tokenizer.encode(short.text, add_special_tokens=False).ids]


def table() -> str:
    """How much less likely right answers are than with the whole prompt and the full cache."""
    there, lines = DATA.read(), [x for x in board.at_1024() if x["seed"] == SEED and x["task"] in TASKS]
    full = _of_board(lines, "agnostic", "full", None)
    out = [
        "| what stays | kept, % | knows the question | -log p, above the whole prompt's |",
        "|---|--:|---|--:|",
    ]
    for keep in KEEP:
        for name, asks in ASKING.items():
            if found := there.get(f"{name} {keep:g}"):
                kept = 100 * np.mean([one["kept"] for one in found.values()])
                scores = {(task, i): x for task, one in found.items() for i, x in enumerate(one["nll"])}
                out.append(_row(f"prompt: `{name}`", kept, asks, scores, full))
        for protocol, name in itertools.product(("agnostic", "aware"), EVICTING):
            scores = _of_board(lines, protocol, name, keep)
            if len(scores) == len(full) and scores:
                out.append(_row(f"cache: `{name}`", 100 * keep, protocol == "aware", scores, full))
    return "\n".join(out)


def _row(name: str, kept: float, asks: bool, scores: dict[Any, float], full: dict[Any, float]) -> str:
    named = [{(task, f"{i:04}"): x for (task, i), x in one.items()} for one in (scores, full)]
    lost = difference(*named, shares=False)
    assert lost is not None and lost.low is not None and lost.high is not None
    said = f"{lost.mean:+.2f} [{lost.low:+.2f}, {lost.high:+.2f}]"
    return f"| {name} | {kept:.0f} | {'yes' if asks else 'no'} | {said} |"


def _of_board(
    lines: Sequence[board.Line], protocol: str, method: str, budget: float | None
) -> dict[tuple[str, int], float]:
    """Take the board's results for a method's first contexts."""
    mine = [x for x in lines if (x["protocol"], x["method"], x["budget"]) == (protocol, method, budget)]
    return {(line["task"], i): x for line in mine for i, x in enumerate(line["nll"][:CONTEXTS])}


PAGE = Page("how-to/shorten.md", {"shortened": table})

if __name__ == "__main__":
    args = parser(__doc__, ("run",)).parse_args()
    if args.what == "run":
        run()
    else:
        PAGE.show(args)
