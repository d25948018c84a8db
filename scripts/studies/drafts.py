"""Drafts of one real model: how many of their tokens it takes, and how fast it then writes.

    kvjax get smollm2-135m
    python -m scripts.studies.drafts run        # measures the rows that the data lacks
    python -m scripts.studies.drafts --write    # writes the table into docs/how-to/drafts.md

The model goes on with a window of prose, once greedily and once with tokens drawn at temperature 1. Greedy
tokens are counted per second of the process on all cores, since other processes take turns on them, when
every program has been compiled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax

import kvjax
from kvjax.models.model import Model
from scripts.docs_tables import DOCS
from scripts.studies import codes
from scripts.studies.runner import Data, Page, progress, study

DATA = Data(DOCS / "drafts.json", {"about": {}, "rows": {}})
LENGTH, NEW, DRAFTED = 512, 48, 4
# By what a row is called: the draft, and the method of the model that checks. None drafts nothing.
ROWS: dict[str, tuple[Any, str | None]] = {
    "nothing": (None, None),
    "`FirstCodes()`, over `quantspec`": (kvjax.FirstCodes(), "quantspec"),
    # Over the same cache, as in TriForce and MagicDec; then over caches of its own.
    "`FewerSlots('quest(budget=128)')`": (kvjax.FewerSlots("quest(budget=128)"), None),
    "`streamingllm(budget=128)`": ("streamingllm(budget=128)", None),
    "`snapkv(budget=128)`": ("snapkv(budget=128)", None),
    "`quest(budget=128)`": ("quest(budget=128)", None),
    "`Lookup(3)`": (kvjax.Lookup(3), None),
}
SAMPLERS = {"greedy": None, "drawn": kvjax.Sampler(temperature=1.0)}


def run(model: Model, rows: Sequence[str] | None = None) -> None:
    """Measure rows, and write each to the data when it is done."""
    about = {"model": model.name, "text": codes.TEXT.name, "tokens": LENGTH, "new": NEW, "k": DRAFTED}
    for name in progress(rows or [name for name in ROWS if name not in DATA.read()["rows"]]):
        row = {name: measured(model, *ROWS[name])}
        DATA.change(lambda data, row=row: data.update(about=about, rows=data["rows"] | row))


def measured(model: Model, draft: Any, method: str | None) -> dict[str, dict[str, float]]:
    """Measure acceptance and passes of every way of drawing tokens, and greedy tokens per process second."""
    found = model.tokenizer.encode(codes.TEXT.read_text()[codes.START : codes.START + 16 * LENGTH])
    tokens = [list(getattr(found, "ids", found))[:LENGTH]]
    written(model, tokens, draft, method, None)  # compiles
    row = {name: written(model, tokens, draft, method, how) for name, how in SAMPLERS.items()}
    del row["drawn"]["rate"]
    return row


def written(
    model: Model, tokens: list[list[int]], draft: Any, method: str | None, how: Any
) -> dict[str, float]:
    """Measure what `NEW` tokens take. Seconds are those from the second token on, without the prompt."""
    common = dict(method=method, max_new_tokens=NEW, sampler=how, stop=[], key=jax.random.key(1))
    marks: list[float] = []
    if draft is None:
        out = kvjax.generate(model, tokens, on_token=lambda *_: marks.append(time.process_time()), **common)
        passes, acceptance = int(out.lengths[0]), 0.0
    else:
        tell = lambda *_: marks.append(time.process_time())  # noqa: E731
        out = kvjax.speculate(model, tokens, draft=draft, k=DRAFTED, on_tokens=tell, **common)
        passes, acceptance = out.passes, out.acceptance
    seconds = time.process_time() - marks[0]
    return {"acceptance": round(acceptance, 3), "passes": passes, "rate": float(f"{(NEW - 1) / seconds:.3g}")}


def table() -> str:
    """Write a row for every draft: acceptance and passes, greedy and drawn, and greedy tokens per second."""
    rows = DATA.read()["rows"]
    lines = [
        "| draft | taken, % | passes | tokens/s | taken at temperature 1, % | passes |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name in (n for n in ROWS if n in rows):
        shown = []
        for how in SAMPLERS:
            one = rows[name][how]
            taken = f"{100 * one['acceptance']:.0f}" if ROWS[name][0] is not None else ""
            shown += [taken, f"{one['passes']}", *([f"{one['rate']:.2g}"] if "rate" in one else [])]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


PAGE = Page("how-to/drafts.md", {"drafts": table})

if __name__ == "__main__":
    study(__doc__, run, PAGE, rows=True)
