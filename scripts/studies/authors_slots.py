"""Whether kvjax keeps the slots that the authors' code keeps, on prompts of the board's real model.

    kvjax get smollm2-135m
    python -m scripts.studies.authors_slots run --clones DIR  # clones of the authors' repositories
    python -m scripts.studies.claims --write                   # writes the table into docs/claims.md

These are the evicting methods that fall farthest below their papers on the board. Queries, keys and attention
are computed in float64; the authors' functions run on them unchanged, and kvjax reads the same prompts.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kvjax
from kvjax.keep.scores.tokens import SeparatorsFirst
from kvjax.models.model import Model
from kvjax.pure import bind
from scripts.docs_tables import DOCS
from scripts.studies.runner import Data, parser, progress
from tests.float64.reference import Decoder, rope, softmax

DATA = Data(DOCS / "authors-slots.json", {"about": {}, "rows": {}})
TASKS, LENGTH, BUDGET = ("niah_single_2", "niah_multikey_1", "vt", "fwe"), 1024, 0.25
# The settings that the board measures, but for LaCache: its authors keep as many newest tokens as layers.
WINDOW, KERNEL, SINKS, SEPLLM_NEWEST = 16, 5, 4, 24


class Row(NamedTuple):
    """A method's sentence, the repository whose code chooses its slots, and why kvjax keeps others, if so."""

    sentence: str
    repository: str
    why: str = "–"

    @property
    def clone(self) -> str:
        return self.repository.split("/")[1]


ROWS = {
    "pyramidkv": Row(
        "pyramidkv(budget=0.25, kernel=5, window=16)", "Zefan-Cai/KVCache-Factory",
        "their layers' counts, in equal whole steps, add up to more than the budget",
    ),
    "h2o": Row("h2o(budget=0.25)", "FMInference/H2O"),
    "snapkv": Row("snapkv(budget=0.25, kernel=5, window=16)", "Zefan-Cai/KVCache-Factory"),
    "tova": Row("tova(budget=0.25)", "schwartz-lab-NLP/TOVA"),
    "sepllm": Row(
        "sepllm(budget=0.25, window=24)", "HKUDS/SepLLM",
        "kvjax gives what separators leave of the budget to newer tokens",
    ),
    "expected-attention": Row("expected-attention(budget=0.25)", "NVIDIA/kvpress"),
    "keydiff": Row("keydiff(budget=0.25)", "NVIDIA/kvpress"),
    "adakv": Row(
        "adakv(budget=0.25, kernel=5, window=16)", "FFY0/AdaKV", "they round the count of every head"
    ),
    "lacache": Row("lacache(budget=0.25, newest=30)", "GATECH-EIC/LaCache"),
}  # fmt: skip


def main() -> None:
    asked = parser(__doc__, ("run",), page=False)
    asked.add_argument("--model", default="smollm2-135m", metavar="MODEL", help="(default: smollm2-135m)")
    asked.add_argument("--clones", type=Path, metavar="DIR", help="where the authors' repositories lie")
    args = asked.parse_args()
    if args.what != "run":
        print(table())
        return
    if args.clones is None:
        asked.error("run needs --clones DIR: a folder with clones of the authors' repositories")
    check(args.clones)
    model = kvjax.load(args.model, dtype="float32")
    assert isinstance(model, Model)
    run(model, args.clones)


def check(clones: Path) -> None:
    """Exit if a repository is missing, before anything runs."""
    missing = sorted({x.repository for x in ROWS.values() if not (clones / x.clone / ".git").exists()})
    if missing:
        sys.exit(f"{clones} lacks clones of {', '.join(missing)}: git clone https://github.com/{missing[0]}")


class Attended(NamedTuple):
    """A layer's attention to a prompt in float64: q, raw_q [N, T, H], k, v [K, T, H], and p [N, T, T].

    separators: the ids of the model's tokenizer that end sentences and their parts.
    """

    layer: int
    layers: int
    tokens: Sequence[int]
    separators: Sequence[int]
    q: np.ndarray
    raw_q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    p: np.ndarray

    @property
    def slots(self) -> int:
        return int(BUDGET * len(self.tokens))


def attended(model: Model, tokens: Sequence[int]) -> Iterator[Attended]:
    """Yield the layers of a Llama from below, one at a time: all of them would take gigabytes."""
    decoder, c, at = Decoder(model), model.config, np.arange(len(tokens))
    x = decoder.rest["embed"][np.asarray(tokens)]
    hidden = at[None] > at[:, None]
    keep = bind(kvjax.method("sepllm", budget=BUDGET), model).keep
    assert keep is not None and isinstance(keep.score, SeparatorsFirst)
    separators = keep.score.separators.ids or ()
    for i, layer in enumerate(decoder.layers):
        raw_q, raw_k, v = decoder.project(layer, x)
        q, k = rope(raw_q, at, c.rope.theta), rope(raw_k, at, c.rope.theta)
        logits = q @ np.repeat(k, c.heads // c.kv_heads, 0).swapaxes(1, 2) / np.sqrt(c.head_dim)
        p = softmax(np.where(hidden, -np.inf, logits))
        yield Attended(i, c.layers, tokens, separators, q, raw_q, k, v, p)
        x = decoder.finish(layer, x, p @ np.repeat(v, c.heads // c.kv_heads, 0))


def run(model: Model, clones: Path) -> None:
    """Measure every method on a prompt of each task that the data lacks; a minute or two for each."""
    from kvjax.eval.tasks.ruler.suite import make_ruler
    from scripts.studies import authors_code

    suite = make_ruler(model, TASKS, length=LENGTH)
    about = {"model": model.fingerprint, "length": LENGTH, "budget": BUDGET, "seed": 0}
    if DATA.read()["about"] != about:
        DATA.write({"about": about, "rows": {}})
    for task in progress(TASKS):
        if all(task in DATA.read()["rows"].get(id, {}).get("prompts", {}) for id in ROWS):
            continue
        sample = suite.sample(task, 0)
        tokens = [*sample.context, *sample.question]
        ours = {id: kept(model, tokens, row.sentence) for id, row in ROWS.items()}
        theirs: dict[str, list[np.ndarray]] = {id: [] for id in ROWS}
        for layer in attended(model, tokens):
            for id, choose in authors_code.kept_by(clones).items():
                theirs[id].append(choose(layer))
        found = {id: overlap(ours[id], theirs[id]) for id in ROWS}

        def add(data: dict[str, Any], found: dict[str, Any] = found, task: str = task) -> None:
            for id, row in ROWS.items():
                new = {"commit": commit_of(clones / row.clone), "prompts": {}}
                data["rows"].setdefault(id, new)["prompts"][task] = found[id]

        DATA.change(add)


def kept(model: Model, tokens: Sequence[int], sentence: str) -> list[np.ndarray]:
    """Which tokens of a prompt kvjax keeps, per layer: bool [K, T]."""
    _, cache = kvjax.prefill(model, [list(tokens)], method=sentence)
    at = np.arange(len(tokens))
    return [
        np.stack([np.isin(at, np.asarray(head)) for head in layer[0]])
        for layer in kvjax.kept_positions(cache)
    ]


def overlap(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> dict[str, Any]:
    """Count the authors' slots, kvjax' and shared ones, and find the least shared part of a layer."""
    both = [int((a & b).sum()) for a, b in zip(ours, theirs, strict=True)]
    count = [int(b.sum()) for b in theirs]
    least = min(x / n for x, n in zip(both, count, strict=True))
    return {
        "authors": sum(count), "kvjax": int(sum(a.sum() for a in ours)), "both": sum(both),
        "least": round(least, 4),
    }  # fmt: skip


def commit_of(clone: Path) -> str:
    command = ["git", "-C", str(clone), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def section() -> str:
    """Write the table, under a sentence that says what was compared."""
    data = DATA.read()
    prompts = max((len(row["prompts"]) for row in data["rows"].values()), default=0)
    return (
        "The evicting methods that fall farthest below their papers, beside their authors' code (for "
        f"Expected Attention and KeyDiff kvpress'), on the same queries, keys and values of {prompts} "
        f"prompts at a budget of {BUDGET}, over all layers and KV heads. Where all slots "
        "are shared, the model and the tasks decide, and not how kvjax reads the paper. No code of hashevict "
        "and lazyllm was found. "
        "`python -m scripts.studies.authors_slots run --clones DIR`\n\n" + table()
    )


def table() -> str:
    """Per method, what share of the authors' slots kvjax keeps, and why it is not all of them."""
    rows = DATA.read()["rows"]
    lines = [
        "| method | their code | their slots | kvjax' slots | shared, % | least in a layer, % | why |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    for id, row in rows.items():
        found, code = list(row["prompts"].values()), ROWS[id]
        sums = {name: sum(x[name] for x in found) for name in ("authors", "kvjax", "both")}
        least = min(x["least"] for x in found)
        lines.append(
            f"| {id} | [{code.repository}](https://github.com/{code.repository}) {row['commit'][:7]} "
            f"| {sums['authors']} | {sums['kvjax']} | {100 * sums['both'] / sums['authors']:.2f} "
            f"| {100 * least:.1f} | {code.why} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
