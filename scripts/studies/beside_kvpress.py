"""kvjax beside transformers + kvpress: the same prompts, the same weights, one core of one run.

    kvjax get smollm2-135m
    python -m scripts.studies.beside_kvpress run        # 15 presses, 16 contexts; about an hour of one core
    python -m scripts.studies.beside_kvpress run --presses snapkv --contexts 1 --out few.json  # two minutes
    python -m scripts.studies.beside_kvpress            # prints the tables
    python -m scripts.studies.beside_kvpress --write    # writes them into docs/beside-kvpress.md

Every context is read and compressed, then the question is read after it and an answer written, greedily, by
both libraries in turn. Compared are the tokens that every KV head of every layer keeps, and the answers.
Results lie in docs/beside-kvpress.json, a press and context a line; a run makes what is not there.
"""

from __future__ import annotations

import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from scripts.studies.beside_kvpress_table import FILE, NONE, PAGE
from scripts.studies.kvpress_sides import Found, Ours, Prompt, Theirs
from scripts.studies.presses import PRESSES, Over
from scripts.studies.runner import Data, parser, progress

TASKS = (
    "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery",
    "vt", "cwe", "fwe",
)  # fmt: skip
REMOVED, NEW = 0.5, 16
LIBRARIES = ("kvjax", "jax", "torch", "transformers", "kvpress")


def main() -> None:
    asked = parser(__doc__, ("run",), seed="of the contexts")
    asked.add_argument("--presses", nargs="+", metavar="PRESS", help=f"(default: all: {', '.join(PRESSES)})")
    asked.add_argument("--contexts", type=int, default=16, help="(default: 16)")
    asked.add_argument("--length", type=int, default=1024, help="tokens of a prompt (default: 1024)")
    asked.add_argument("--model", default="smollm2-135m", help="(default: smollm2-135m)")
    asked.add_argument("--out", type=Path, default=FILE, metavar="FILE", help="where results lie")
    args = asked.parse_args()
    if wrong := [name for name in args.presses or () if name not in (*PRESSES, NONE)]:
        asked.error(f"--presses {wrong[0]}: expected some of {', '.join((NONE, *PRESSES))}")
    if args.what is None:
        PAGE.show(args)
    else:
        run(args.out, args.model, args.presses or [NONE, *PRESSES], args.contexts, args.length, args.seed)


def run(out: Path, model: str, presses: list[str], contexts: int, length: int, seed: int) -> None:
    """Adds what is missing to the data, a press and a context at a time."""
    data = Data(out, {"settings": {}, "runs": [], "rows": {}})
    study = Study(model, contexts, length, seed)
    settings = study.settings
    if (held := data.read()["settings"]) and held != settings:
        sys.exit(f"{out} holds results of {held}, expected {settings}: choose another file with --out")
    here = machine()
    data.change(lambda found: found.update(settings=settings))
    data.change(lambda found: found["runs"].append(here) if here not in found["runs"] else None)
    number = data.read()["runs"].index(here)
    wanted = [(press, name) for press in presses for name in study.prompts]
    for press, name in progress(pair for pair in wanted if " ".join(pair) not in data.read()["rows"]):
        row = {"run": number} | study.row(press, name)
        data.change(lambda found, key=f"{press} {name}", row=row: found["rows"].update({key: row}))
        print(f"{press} {name}: {row}", flush=True)


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
        samples = [suite.sample(TASKS[i % len(TASKS)], i // len(TASKS)) for i in range(contexts)]
        self.prompts = {s.id: Prompt(list(s.context), list(s.question)) for s in samples}
        self.settings = {
            "model": Path(model).name, "fingerprint": loaded.fingerprint, "dtype": "float32",
            "length": length, "seed": seed, "removed": REMOVED, "new_tokens": NEW,
        }  # fmt: skip
        # Presses that repeat a context read the tokenizer from there whenever they are made.
        self.folder = tempfile.TemporaryDirectory()
        save_hf(loaded, Path(self.folder.name) / "model")
        self.theirs = Theirs(Path(self.folder.name) / "model")
        widths = tuple(bucket(max(len(prompt[i]) for prompt in self.prompts.values())) for i in (0, 1))
        self.ours = Ours(loaded, (widths[0], widths[1]), self.theirs.repeat_prefix())

    def row(self, name: str, context: str) -> dict[str, Any]:
        """How one press and our sentence for it fare on one context."""
        press, prompt = PRESSES.get(name), self.prompts[context]
        if press is not None:
            whole = len(prompt.context) // press.multiple * press.multiple
            prompt = prompt._replace(context=prompt.context[:whole])
        sides = self.theirs.run(press, prompt, REMOVED, NEW), self.ours.run(press, prompt, REMOVED, NEW)
        return {"tokens": len(prompt.context)} | compared(*sides, over=press.over if press else "head")


def compared(theirs: Found, ours: Found, over: Over) -> dict[str, Any]:
    """A row: which heads keep the same tokens, how near swapped scores lie, where answers part, the seconds.

    Pairs are of kvjax and kvpress; `heads` are those that agree, and all; `only` are tokens that one keeps.
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
        row["score_gap"] = score_gap(theirs.scores, theirs.kept, ours.kept, over)
    if theirs.answer is None or ours.answer is None:
        return row | {"error": theirs.error}
    parts = [i for i, (a, b) in enumerate(zip(theirs.answer, ours.answer, strict=True)) if a != b]
    row["least_logit_gap"] = min(theirs.gaps)
    if parts:
        row |= {"parts_at": parts[0], "logit_gap": theirs.gaps[parts[0]]}
    return row


def score_gap(scores: np.ndarray | None, theirs: np.ndarray, ours: np.ndarray, over: Over) -> float | None:
    """By how much a slot that ours drops outscores one that ours keeps instead, relative to the larger score.

    The most of all heads (layers, stacks), by the press's scores [L, K, T]; 0 where ours keeps the best ones,
    fewer or more than theirs. None without scores.
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


if __name__ == "__main__":
    main()
