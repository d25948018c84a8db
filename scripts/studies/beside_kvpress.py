"""Compares kvjax with transformers + kvpress: the same prompts and weights, on one core.

    kvjax get smollm2-135m
    python -m scripts.studies.beside_kvpress run        # 15 presses, 16 contexts; about an hour of one core
    python -m scripts.studies.beside_kvpress run --presses snapkv --contexts 1 --out few.json  # two minutes
    python -m scripts.studies.beside_kvpress check      # how far float32 moves the scores of swapped slots
    python -m scripts.studies.beside_kvpress            # prints the tables
    python -m scripts.studies.beside_kvpress --write    # writes them into docs/beside-kvpress.md

Both libraries read and compress every context, then read the question and generate a greedy answer. Compared
are the tokens that every KV head of every layer keeps, and the answers. Results are in
docs/beside-kvpress.json, one line per press and context; a run measures the missing ones.
"""

from __future__ import annotations

import platform
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from scripts.studies.beside_kvpress_table import FILE, NONE, PAGE
from scripts.studies.kvpress_sides import Found, Ours, Prompt, Theirs
from scripts.studies.presses import PRESSES, Over, Press
from scripts.studies.runner import Data, parser, progress

TASKS = (
    "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery",
    "vt", "cwe", "fwe",
)  # fmt: skip
CONTEXTS, REMOVED, NEW = 16, 0.5, 16
EMPTY = {"settings": {}, "runs": [], "rows": {}}
LIBRARIES = ("kvjax", "jax", "torch", "transformers", "kvpress")


def main() -> None:
    asked = parser(__doc__, ("run", "check"), seed="of the contexts")
    asked.add_argument("--presses", nargs="+", metavar="PRESS", help=f"(default: all: {', '.join(PRESSES)})")
    asked.add_argument("--contexts", type=int, default=CONTEXTS, help=f"(default: {CONTEXTS})")
    asked.add_argument("--length", type=int, default=1024, help="tokens of a prompt (default: 1024)")
    asked.add_argument("--model", default="smollm2-135m", help="(default: smollm2-135m)")
    asked.add_argument("--out", type=Path, default=FILE, metavar="FILE", help="where results lie")
    args = asked.parse_args()
    if wrong := [name for name in args.presses or () if name not in (*PRESSES, NONE)]:
        asked.error(f"--presses {wrong[0]}: expected some of {', '.join((NONE, *PRESSES))}")
    if args.what is None:
        PAGE.show(args)
        return
    study, data = Study(args.model, args.contexts, args.length, args.seed), Data(args.out, EMPTY)
    if (held := data.read()["settings"]) and held != study.settings:
        sys.exit(f"{args.out} holds results of {held}, expected {study.settings}: choose another with --out")
    presses = args.presses or [NONE, *PRESSES]
    (run if args.what == "run" else check)(study, data, presses)


def run(study: Study, data: Data, presses: Sequence[str]) -> None:
    """Measure what the data lacks, one press and context at a time."""
    here = machine()
    data.change(lambda found: found.update(settings=study.settings))
    data.change(lambda found: found["runs"].append(here) if here not in found["runs"] else None)
    number = data.read()["runs"].index(here)
    wanted = [(press, name) for press in presses for name in study.prompts]
    for press, name in progress(pair for pair in wanted if " ".join(pair) not in data.read()["rows"]):
        row = {"run": number} | study.row(press, name)
        data.change(lambda found, key=f"{press} {name}", row=row: found["rows"].update({key: row}))
        print(f"{press} {name}: {row}", flush=True)


def check(study: Study, data: Data, presses: Sequence[str]) -> None:
    """Measure, for rows whose kept sets differ, how far kvpress is from its own float64 results."""
    rows = data.read()["rows"]
    wanted = [k for k, row in rows.items() if row.get("score_gap") and "double" not in row]
    for key in progress(key for key in wanted if key.split()[0] in presses):
        double = study.double(*key.split())
        data.change(lambda found, key=key, double=double: found["rows"][key].update(double=double))
        print(f"{key}: {double}", flush=True)


def machine() -> dict[str, Any]:
    """Versions and hardware of a run."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return {name: version(name) for name in LIBRARIES} | {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": names[0] if names else platform.processor(),
        "cores": 1,
    }


class Study:
    """Both libraries with one model's weights in float32, and the prompts."""

    def __init__(self, model: str, contexts: int, length: int, seed: int):
        from scripts.bench.timing import pin

        pin(1)
        import kvjax
        from kvjax.api.chunks import bucket
        from kvjax.eval.tasks.ruler.suite import make_ruler
        from kvjax.models.hf import save_hf
        from kvjax.models.model import Model

        loaded = kvjax.load(model, dtype="float32")
        assert isinstance(loaded, Model)
        suite = make_ruler(loaded, TASKS, length=length, seed=seed)
        # Runs of fewer contexts compile the same programs.
        drawn = range(max(contexts, CONTEXTS))
        samples = [suite.sample(TASKS[i % len(TASKS)], i // len(TASKS)) for i in drawn]
        prompts = [Prompt(list(s.context), list(s.question)) for s in samples]
        self.prompts = {s.id: prompt for s, prompt in zip(samples[:contexts], prompts, strict=False)}
        self.settings = {
            "model": Path(model).name, "fingerprint": loaded.fingerprint, "dtype": "float32",
            "length": length, "seed": seed, "removed": REMOVED, "new_tokens": NEW,
        }  # fmt: skip
        # Presses that repeat a context read the tokenizer from that folder whenever they are made.
        self.folder = tempfile.TemporaryDirectory()
        save_hf(loaded, Path(self.folder.name) / "model")
        self.theirs = Theirs(Path(self.folder.name) / "model")
        context, question = (bucket(max(map(len, ids))) for ids in zip(*prompts, strict=True))
        self.in_float64: Theirs | None = None
        self.ours = Ours(loaded, (context, question), self.theirs.repeat_prefix())

    def prompt(self, press: Press | None, context: str) -> Prompt:
        """Write the prompt in the form that a press takes."""
        prompt = self.prompts[context]
        whole = 1 if press is None else press.multiple
        return prompt._replace(context=prompt.context[: len(prompt.context) // whole * whole])

    def double(self, name: str, context: str) -> dict[str, Any]:
        """Run kvpress in float32 and in float64."""
        if self.in_float64 is None:
            self.in_float64 = Theirs(Path(self.folder.name) / "model", "float64")
        press = PRESSES[name]
        prompt = self.prompt(press, context)
        single, double = (side.run(press, prompt, REMOVED, 1) for side in (self.theirs, self.in_float64))
        same = (single.kept == double.kept).all(-1)
        return {"heads": [int(same.sum()), int(same.size)], "score_error": score_error(single, double)}

    def row(self, name: str, context: str) -> dict[str, Any]:
        """Compute the results of one press, and of kvjax's method for it, on one context."""
        press = PRESSES.get(name)
        prompt = self.prompt(press, context)
        sides = self.theirs.run(press, prompt, REMOVED, NEW), self.ours.run(press, prompt, REMOVED, NEW)
        return {"tokens": len(prompt.context)} | compared(*sides, over=press.over if press else "head")


def compared(theirs: Found, ours: Found, over: Over) -> dict[str, Any]:
    """Write a row: which heads keep the same tokens, the gap of swapped scores, where answers part, seconds.

    Pairs are (kvjax, kvpress). `heads`: how many agree, and how many there are. `only`: the tokens that just
    one of the two keeps, in `layers`.
    """
    other = theirs.kept != ours.kept
    row: dict[str, Any] = {
        "kept": [int(ours.kept.sum()), int(theirs.kept.sum())],
        "heads": [int((~other.any(-1)).sum()), int(other[..., 0].size)],
        "read_s": [round(ours.read_s, 3), round(theirs.read_s, 3)],
        "answer_s": [round(ours.answer_s, 3), round(theirs.answer_s, 3)],
        "compile_s": round(ours.compile_s, 1),
    }
    if other.any():
        row["only"] = [int((ours.kept & other).sum()), int((theirs.kept & other).sum())]
        row["layers"] = np.flatnonzero(other.any((1, 2))).tolist()
        row["score_gap"] = score_gap(theirs.scores, theirs.kept, ours.kept, over)
    if theirs.answer is None or ours.answer is None:
        return row | {"error": theirs.error}
    parts = [i for i, (a, b) in enumerate(zip(theirs.answer, ours.answer, strict=True)) if a != b]
    row["least_logit_gap"] = min(theirs.gaps)
    if parts:
        row |= {"parts_at": parts[0], "logit_gap": theirs.gaps[parts[0]]}
    return row


def score_gap(scores: np.ndarray | None, theirs: np.ndarray, ours: np.ndarray, over: Over) -> float | None:
    """Find the most by which a slot that kvjax drops outscores one that it keeps, relative to the larger one.

    It is the maximum over heads (layers, stacks), by the press's scores [L, K, T]; 0 if kvjax keeps the best
    slots, whatever their number. None without scores.
    """
    if scores is None:
        return None
    first = {"head": 2, "layer": 1, "stack": 0}[over]
    shape = (-1, int(np.prod(scores.shape[first:])))
    gaps = [0.0]
    for row, a, b in zip(*(x.reshape(shape) for x in (scores.astype(np.float64), theirs, ours)), strict=True):
        lost, gained = row[a & ~b], row[b & ~a]
        if len(lost) or len(gained):
            best = lost.max() if len(lost) else row[~b].max()
            worst = gained.min() if len(gained) else row[b].min()
            gaps.append(float((best - worst) / max(abs(best), abs(worst), 1e-30)))
    return max(gaps)


def score_error(single: Found, double: Found) -> float | None:
    """Compute the relative difference of float32 and float64 scores, for slots within 1% of the cut.

    The cut is the lowest score that a KV head keeps. The result is the median over heads of the largest
    difference; None without scores.
    """
    if single.scores is None or double.scores is None:
        return None
    shape, most = (-1, single.scores.shape[-1]), []
    for a, b, kept in zip(
        *(x.reshape(shape) for x in (single.scores, double.scores, double.kept)), strict=True
    ):
        cut = b[kept].min()
        near = np.abs(b - cut) <= 0.01 * abs(cut)
        most.append(np.max(np.abs(a - b)[near] / abs(cut)))
    return float(np.median(most))


if __name__ == "__main__":
    main()
