"""Joined texts with KVLink's link tokens between them: what they give back of answers over the whole text.

    python -m scripts.studies.linked run        # fits links, and measures (some minutes)
    python -m scripts.studies.linked --write    # writes the table into docs/how-to/prefixes.md

Contexts of the recall tasks are cut into pieces, which are read separately and joined (`kvjax.join`). Links
are fitted to contexts of another seed, with their questions and answers after them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import kvjax
from kvjax.commands.texts import read_texts
from kvjax.fitting.prompts.links import fit_links
from kvjax.grammar.fitted import Fitted
from kvjax.models.model import Model
from scripts.docs_tables import DOCS
from scripts.studies.joined import said
from scripts.studies.runner import Data, Page, progress, study

DATA = Data(DOCS / "linked.json", {"about": {}, "rows": {}})
PIECES, LENGTH, AFTER, LINKS, TEXTS, ASKED = 8, 256, 32, 5, 128, 128
TASKS = ("chase", "get", "multikey")
FIT: dict[str, Any] = dict(batch=8, epochs=24, rate=0.03)


def run(model: Model) -> None:
    """Fit links, measure all contexts, and write the rows to the data."""
    about = {"model": model.name, "tasks": TASKS, "pieces": PIECES, "tokens": LENGTH // PIECES}
    about |= {"links": LINKS, "texts": TEXTS, "asked": ASKED, **FIT}
    share = LENGTH / (LENGTH + AFTER)
    texts = [text for text, _ in rows_of(model, TEXTS, seed=1)]
    # Links after one text are no more than a learned prompt.
    prompt, links = (
        fit_links(model, texts, tokens=LINKS, documents=n, share=share, progress=progress, **FIT)
        for n in (1, PIECES)
    )
    tests = rows_of(model, ASKED, seed=2)
    found = [measured(model, text, answer, prompt, links) for text, answer in progress(tests)]
    rows = {name: np.mean([one[name] for one in found], 0).round(4).tolist() for name in found[0]}
    DATA.change(lambda data: data.update(about=about, rows=rows))


def rows_of(model: Model, rows: int, seed: int) -> list[tuple[list[int], int]]:
    """Return the newest tokens of contexts, questions and answers, and how many of them are the answer."""
    length = LENGTH + AFTER
    samples = read_texts(
        model, text=None, tasks=TASKS, rows=3 * rows, length=length + 64, seed=seed, questions=True
    )
    each = [([*s.context, *s.question, *s.answer], len(s.answer)) for s in samples]
    return [(text[-length:], answer) for text, answer in each if len(text) >= length][:rows]


def measured(
    model: Model, text: list[int], answer: int, prompt: Fitted, links: Fitted
) -> dict[str, tuple[float, bool]]:
    """Measure -log p of an answer's tokens, and whether all are likeliest, for ways to read a context."""
    size, after = LENGTH // PIECES, text[LENGTH:]
    pieces = [kvjax.prefill(model, [text[at : at + size]])[1] for at in range(0, LENGTH, size)]
    _, whole = kvjax.prefill(model, [text[:LENGTH]])
    pasts = {
        "one text": kvjax.prefill(model, [text[:LENGTH]], room=AFTER)[1],
        f"one text with {LINKS} links": kvjax.join(model, [whole], room=AFTER, links=prompt),
        "pieces": kvjax.join(model, pieces, room=AFTER),
        f"pieces with {LINKS} links each": kvjax.join(model, pieces, room=AFTER, links=links),
    }
    at, found = np.arange(AFTER - 1 - answer, AFTER - 1), {}
    for name, past in pasts.items():
        logp, tokens = np.asarray(said(model, past, after))[at], after[-answer:]
        right = bool((logp.argmax(-1) == tokens).all())
        found[name] = float(-logp[np.arange(answer), tokens].mean()), right
    return found


def table() -> str:
    """Return a row for each way to read a context: the mean of -log p of answers, and how many are right."""
    lines = ["| context | -log p of answers, nats per token | right, % |", "|---|--:|--:|"]
    for name, (surprise, right) in DATA.read()["rows"].items():
        lines.append(f"| {name} | {surprise:.3f} | {100 * right:.0f} |")
    return "\n".join(lines)


PAGE = Page("how-to/prefixes.md", {"linked": table})

if __name__ == "__main__":
    study(__doc__, run, PAGE, model="recall-tiny")
