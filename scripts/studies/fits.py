"""What fits take: seconds on the shipped model, and on a real one with the error of what they fit.

    kvjax get smollm2-135m
    python -m scripts.studies.fits run --model recall-tiny          # every fit; goes on after a stop
    python -m scripts.studies.fits run --model smollm2-135m         # those without gradients
    python -m scripts.studies.fits                                  # prints the tables
    python -m scripts.studies.fits --write                          # writes them into docs/training.md

Seconds are those of the process on all cores, since other processes take turns on them. Fits that use the
same keys and values read the texts once: "after reading" stands beside the seconds of the later ones. On the
shipped model texts are its tasks, on others the prose of `codes.py`, and codecs that are fitted get a row in
docs/codes.json, too. A method that evicts nothing from a text of that length has no KL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.commands.texts import read_texts
from kvjax.fitting import learns_from_questions
from kvjax.fitting.loops import keys_values
from kvjax.grammar.fitted import Fitted
from kvjax.methods.parse import parse_method
from kvjax.models.model import Model
from scripts.docs_tables import DOCS
from scripts.fixtures import fits as shipped
from scripts.studies import codes
from scripts.studies.runner import Data, Page, progress, study

DATA = Data(DOCS / "fits.json", {"about": {}, "rows": {}}, depth=3)
ROWS, TOKENS, SEED, BUDGET = 32, 512, 7, 0.5
# Fits without gradients, of codecs, of what rewrites weights, and of scores and reads, with their options.
CODECS: dict[str, dict[str, Any]] = {
    "qserve": {}, "skvq": {}, "resq": {}, "oscar": {}, "smoothquant": {}, "q-int4": {}, "prefixquant": {},
    "kvquant": {}, "aqua-kv": {}, "kvtuner": dict(mean=3), "cq": {}, "csr": dict(size=128), "commvq": {},
}  # fmt: skip
REWRITES: dict[str, dict[str, Any]] = {"palu": {}, "eigen-attention": {}}
OTHERS: dict[str, dict[str, Any]] = {
    "q-filters": {}, "triattention": {}, "expected-attention": {}, "think": {}, "razorattention": {},
    "epicache": {}, "chai": {}, "kvsharer": {}, "minference": {}, "homer": {}, "kvzap": {},
}  # fmt: skip
# Fits with gradients through codes.
GRADIENTS = ("spinquant", "omniquant", "affinequant", "flatquant", "wkvquant")


def of_model(model: Model) -> dict[str, dict[str, Any]]:
    """Return the fits of a model by method, with their options."""
    free = CODECS | REWRITES | OTHERS
    if model.name != shipped.MODEL:
        return free
    return {name: {} for name in GRADIENTS} | free | {n: more for n, (_, more) in shipped.FITS.items()}


def run(model: Model, rows: Sequence[str] | None) -> None:
    """Fit the methods that the data lacks, and write each row when it is done."""
    known, options = DATA.read()["rows"].get(model.name, {}), of_model(model)
    real = model.name != shipped.MODEL
    read = codes.reading(model) if real else None
    shared = Remembered(keys_values._read)
    if real:
        keys_values._read = shared
    for name in progress(rows or [name for name in options if name not in known]):
        count = ROWS if real else shipped.FITS.get(name, (ROWS, {}))[0]
        texts = codes.prose(model, count, TOKENS) if real else _tasks(model, name, count)
        start, wall = time.process_time(), time.perf_counter()
        found = kvjax.fit(model, name, texts, **_split(name, options[name]))
        row: dict[str, Any] = {"seconds": round(time.process_time() - start, 1), "texts": len(texts)}
        row["clock"] = round(time.perf_counter() - wall, 1)
        row |= {"shared": True} if shared.reused() else {}
        if read is not None:
            row |= measured(name, read, found)
        DATA.change(lambda data, n=name, row=row: _added(data, model.name, n, row))


def _added(data: dict[str, Any], model: str, name: str, row: dict[str, Any]) -> None:
    data["rows"][model] = data["rows"].get(model, {}) | {name: row}


def _split(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Split the options of a fit off; a budget stays with `kvjax.fit`."""
    return options | ({"budget": BUDGET} if name == "lukv" else {})


def _tasks(model: Model, name: str, rows: int) -> list[Any]:
    return read_texts(
        model, text=None, tasks=None, rows=rows, length=TOKENS, seed=SEED,
        questions=learns_from_questions(name),
    )  # fmt: skip


class Remembered:
    """Keys and values of texts that an earlier fit has read are not computed again."""

    def __init__(self, read: Callable[..., Any]):
        self.read, self.known, self.kinds = read, {}, set()

    def __call__(self, run: Any, raw: bool, params: Any, tokens: Any, lengths: Any) -> Any:
        key = raw, np.asarray(tokens).tobytes()
        self.kinds.add(key in self.known)
        if key not in self.known:
            self.known[key] = tuple(np.asarray(x) for x in self.read(run, raw, params, tokens, lengths))
        return self.known[key]

    def reused(self) -> bool:
        """Whether all that was read since the last question was known."""
        kinds, self.kinds = self.kinds, set()
        return kinds == {True}


def measured(name: str, read: codes.Reading, fitted: Fitted) -> dict[str, Any]:
    """KL of the window's next tokens; of a codec also bits and errors, which join docs/codes.json."""
    if name in CODECS:
        row = codes.measured(name, read, fitted)
        method = parse_method(name, {name: {"fitted": fitted}})[1](None)
        codes.add(name, row | {"step": codes.step_time(read.model, method)}, read.model)
        return {key: row[key] for key in ("bits", "keys", "values", "kl")}
    build = parse_method(name, {name: {"fitted": fitted}})[1]
    ids = codes.window(read.model)
    method = build(BUDGET if build.takes_budget else None)
    model = kvjax.prepare(read.model, method)
    _, cache = kvjax.prefill(model, [ids[: codes.LENGTH]], room=codes.AFTER, method=method)
    # A layer that shares another one's slots has none.
    least = min(int((x >= 0).sum(-1).min()) for x in kvjax.kept_positions(cache) if x.size)
    if method.keep is not None and least == codes.LENGTH:
        # Nothing is evicted from a text of this length, so a KL of zero says nothing about the fit.
        return {}
    return {"kl": codes.kl(read.logp, jnp.asarray(codes.said(model, cache, read.behind)))}


def table(model: str) -> str:
    """Seconds of every fit of a model, and the error of what it fits, where it was measured."""
    rows = DATA.read()["rows"].get(model, {})
    if model == shipped.MODEL:
        cells = [f"`{n}` {row['seconds']:.2g}" for n, row in sorted(rows.items(), key=_seconds)]
        return ", ".join(cells) + "."
    out = ["| method | seconds | bits | error of keys | error of values | KL |", "|---|--:|--:|--:|--:|--:|"]
    for name, row in sorted(rows.items(), key=_seconds):
        cells = [f"{row[key]:.2g}" if key in row else "" for key in ("bits", "keys", "values", "kl")]
        reading = " after reading" if row.get("shared") else ""
        out.append(f"| `{name}` | {row['seconds']:.0f}{reading} | {' | '.join(cells)} |")
    return "\n".join(out)


def _seconds(item: tuple[str, dict[str, Any]]) -> float:
    return item[1]["seconds"]


PAGE = Page(
    "training.md",
    {"fits shipped": lambda: table(shipped.MODEL), "fits real": lambda: table("smollm2-135m")},
)

if __name__ == "__main__":
    study(__doc__, run, PAGE, rows=True)
