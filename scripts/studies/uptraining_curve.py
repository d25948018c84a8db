"""Compares converting a model and training it briefly with training from scratch, for three conversions.

    python -m scripts.studies.uptraining_curve train --steps 4000     # goes on where it was cut
    python -m scripts.studies.uptraining_curve --write                # the table in docs/training.md
    python -m scripts.studies.uptraining_curve --picture F.png        # and the curves

A model of multi-head attention (`bytes`) is trained, converted to each of `CONVERSIONS`, and trained on for
up to 5 % of its steps at a constant rate; for comparison, the same architecture is trained from scratch for
all steps. Held-out bits per byte after 0, 1, 2 and 5 % and at the end are in docs/uptraining-curve.json, with
the settings and the seeds.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvjax
from kvjax.base.atomic_files import write_atomic
from kvjax.io.checkpoint import save_checkpoint
from kvjax.io.gin_bindings import load_training
from kvjax.train.conversion.conversions import convert
from kvjax.train.data.byte_tokenizer import VOCAB
from kvjax.train.loop import train
from kvjax.train.settings import Training, training
from scripts.docs_tables import DOCS
from scripts.studies.runner import Data, Page, log_of, parser

DATA = Data(DOCS / "uptraining-curve.json")
CONVERSIONS = {"MQA": "gqa:kv_heads=1", "MLA": "mla:rank=48", "CLA": "cla:every=2"}
SHARES = (0, 1, 2, 5)
# The learning rate after conversion, a third of the usual one, as in configs/train/uptrain.gin.
PEAK = 1e-3


def main(words: Sequence[str] | None = None) -> None:
    asked = parser(__doc__, ("train",))
    asked.add_argument("--steps", type=int, default=4000, help="of the original, and from scratch")
    asked.add_argument("--set", nargs="+", default=[], metavar="SECTION.NAME=VALUE", help="for all runs")
    asked.add_argument("--out", type=Path, default=Path("runs/uptraining"), metavar="DIR")
    asked.add_argument("--data", type=Path, default=DATA.path, metavar="FILE")
    asked.add_argument("--picture", type=Path, metavar="FILE", help="where to draw the curves")
    args = asked.parse_args(words)
    data = Data(args.data)
    if args.what == "train":
        data.write(measure(args.steps, args.set, args.out))
        return
    Page("training.md", {"uptraining": lambda: table(data.read())}).show(args)
    if args.picture is not None and (found := data.read()):
        draw(found, args.picture)


def measure(steps: int, changes: Sequence[str], out: Path) -> dict[str, Any]:
    """Measure all numbers of the table; runs that are in `out` are not repeated."""
    run = training(load_training("bytes", [f"train.steps={steps}", *changes]), VOCAB)
    original = trained(run, out / "original")
    rows = {}
    for name, spec in CONVERSIONS.items():
        folder = out / name.lower()
        if not (folder / "converted").is_dir():
            save_checkpoint(convert(kvjax.load(original / "model"), spec), folder / "converted")
        config = kvjax.load(folder / "converted").config
        scratch = trained(dataclasses.replace(run, config=config), folder / "scratch")
        on = trained(uptraining(run, folder / "converted"), folder / "uptrained")
        bits = {line["step"]: line["bits_per_byte"] for line in log_of(on)}
        rows[name] = {
            "to": spec,
            "scratch": log_of(scratch)[-1]["bits_per_byte"],
            "after": {str(share): bits[count] for share, count in counts(steps).items()},
        }
        rows[name]["after"]["0"] = held_out(run, folder / "converted", folder / "before")
        print(f"{name}: {rows[name]}", flush=True)
    last = log_of(original)[-1]
    budget: dict[str, Any] = {
        "steps": steps,
        "set": list(changes),
        "tokens": last["tokens"],
        "uptrain.peak": PEAK,
    }
    budget["seeds"] = {"train": run.loop.seed, "data": run.data.seed}
    return budget | {"original": last["bits_per_byte"], "rows": rows}


def counts(steps: int) -> dict[int, int]:
    """Return the numbers of steps that correspond to each share."""
    return {share: max(1, round(steps * share / 100)) for share in SHARES if share}


def uptraining(run: Training, start: Path) -> Training:
    """Train for five per cent of a run's steps at a constant rate, with the table's evaluations."""
    asked = counts(run.loop.steps).values()
    steps, every = max(asked), math.gcd(*asked)
    loop = dataclasses.replace(run.loop, steps=steps, log_every=every, evaluate_every=every)
    optimiser = dataclasses.replace(run.optimiser, peak=PEAK, schedule="constant", warmup=0)
    return dataclasses.replace(run, config=None, start=str(start), loop=loop, optimiser=optimiser)


def held_out(run: Training, model: Path, out: Path) -> float:
    """Bits per byte of a model without training: one step at learning rate 0."""
    once = dataclasses.replace(uptraining(run, model), optimiser=dataclasses.replace(run.optimiser, peak=0.0))
    loop = dataclasses.replace(once.loop, steps=1, log_every=1, evaluate_every=1)
    return log_of(trained(dataclasses.replace(once, loop=loop), out))[-1]["bits_per_byte"]


def trained(run: Training, folder: Path) -> Path:
    """Train a run to its end, and return its folder; an interrupted run resumes."""
    if not (folder / "model").is_dir():
        train(run, folder, resume=(folder / "run.json").exists())
    return folder


def table(found: dict[str, Any] | None) -> str:
    if not found:
        return "Not measured yet: `python -m scripts.studies.uptraining_curve train`."
    head = ["`--to`", *(f"after {share} %" for share in SHARES), "from scratch, 100 %"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in found["rows"].values():
        after = [f"{row['after'][str(share)]:.3f}" for share in SHARES]
        lines.append(f"| `{row['to']}` | {' | '.join(after)} | {row['scratch']:.3f} |")
    note = (
        f"Bits per byte of held-out text. The original: {found['original']:.3f} after {found['steps']:,} "
        f"steps, {found['tokens']:,} bytes."
    )
    return "\n".join([*lines, "", note])


def draw(found: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4.0), layout="constrained")
    axes = figure.subplots()
    for (name, row), colour in zip(found["rows"].items(), ("#0072B2", "#D55E00", "#009E73"), strict=True):
        axes.plot(SHARES, [row["after"][str(share)] for share in SHARES], "o-", color=colour, label=name)
        axes.axhline(row["scratch"], color=colour, linestyle="--", linewidth=1)
    axes.axhline(found["original"], color="black", linewidth=1, label="original")
    axes.set_xlabel("% of the original's steps (dashed: from scratch, all of them)")
    axes.set_ylabel("bits per byte of held-out text")
    axes.legend()
    axes.grid(alpha=0.3)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    write_atomic(path, file.getvalue())


PAGE = Page("training.md", {"uptraining": lambda: table(DATA.read())})

if __name__ == "__main__":
    main()
