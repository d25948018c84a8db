"""What comes with kvjax for the shipped model: kvjax/fits/recall-tiny, fitted anew in some minutes.

    python scripts/fits.py                             # says what there is, and how large
    python scripts/fits.py --write [METHOD ...]        # fits all, or some methods
    python scripts/fits.py --write --model DIR --out DIR  # the same for another model of this language

Everything is read from the model's own tasks, as `kvjax fit METHOD` reads them, and stored in float16 (whole
numbers as they are).
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvjax
from kvjax.commands.texts import read_texts
from kvjax.fitting import learns_from_questions
from kvjax.grammar.fitted import SHIPPED, save_fitted
from kvjax.io.gin_bindings import load_preset
from kvjax.methods.parse import parse_method

MODEL = "recall-tiny"
# Rows of 512 tokens, and the options of each fit. Widths are below the papers' to stay below 100 KB.
FITS: dict[str, tuple[int, dict[str, Any]]] = {
    "kvzap": (32, {}),
    "homer": (32, {}),
    "fast-kvzip": (32, dict(rank=8, sink_keys=8)),
    "locret": (64, dict(hidden=32)),
    "wg-kv": (32, dict(hidden=64, recent=16)),
    "dms": (32, dict(recent=16, epochs=12)),
    "attention-gate": (32, dict(epochs=20)),
    "dmc": (32, dict(epochs=20)),
    "dcp": (32, {}),
    "kv-distill": (128, dict(rank=12, epochs=12)),
    "gisting": (256, dict(rank=12, epochs=6)),
    "ccm": (256, dict(rank=12, epochs=6)),
    "ccm-merge": (256, dict(rank=12, epochs=6)),
    "loma": (256, dict(rank=12, epochs=6)),
    "neurocache": (128, {}),
    "restorekv": (128, dict(budget=0.125, rank=12, epochs=6)),
    "adore": (48, dict(hidden=20)),
    "lococo": (32, dict(budget=0.25, slots=16, neighbours=5, epochs=6)),
    "less": (32, dict(budget=0.25, hidden=32)),
    "evolkv": (32, dict(budget=0.25)),
    "headkv": (32, {}),
    "duoattention": (32, {}),
    "retrieval-head": (32, {}),
    "razorattention": (32, {}),
    "kvsharer": (32, {}),
    "chai": (32, {}),
    "lukv": (32, {}),
    "q-filters": (32, {}),
    "compresskv": (32, {}),
    "triattention": (32, {}),
    "kvquant": (32, {}),
}
# What these learn is of their window, so they learn with that of the preset for prompts of 512 tokens.
AS_PRESET = ("neurocache",)
SEED = 7


def fit(model: kvjax.Model, method: str, out: Path) -> None:
    """Fits a method to a model, and writes what it found to a file of its name in the folder `out`."""
    rows, options = FITS[method]
    texts = read_texts(
        model, text=None, tasks=None, rows=rows, length=512, seed=SEED,
        questions=learns_from_questions(method),
    )  # fmt: skip
    start = time.monotonic()
    built = parse_method(method, load_preset("short"))[1](None) if method in AS_PRESET else method
    found = kvjax.fit(model, built, texts, **options)
    half = {name: x.astype(np.float16) if x.dtype == np.float32 else x for name, x in found.arrays.items()}
    save_fitted(out / f"{method}.safetensors", dataclasses.replace(found, arrays=half))
    print(f"{method}: {time.monotonic() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", nargs="*", choices=tuple(FITS), metavar="METHOD", help="(default: all)")
    parser.add_argument("--model", default=MODEL, metavar="NAME|DIR", help=f"(default: {MODEL})")
    parser.add_argument(
        "--out", type=Path, default=SHIPPED / MODEL, metavar="DIR", help="(default: the package)"
    )
    args = parser.parse_args()
    if args.model != MODEL and args.out == SHIPPED / MODEL:
        parser.error(f"{args.model} was given without --out, expected a folder for its fits: add --out DIR")
    if args.write is not None:
        model = kvjax.load(args.model)
        for method in args.write or FITS:
            fit(model, method, args.out)
    for file in sorted(args.out.glob("*.safetensors")):
        print(f"{file.stem:16} {file.stat().st_size / 1024:6.1f} KiB")


if __name__ == "__main__":
    main()
