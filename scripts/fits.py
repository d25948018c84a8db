"""What comes with kvjax for the shipped model: kvjax/fits/recall-tiny, fitted anew in some minutes.

    python scripts/fits.py                    # says what there is, and how large
    python scripts/fits.py --write [METHOD]   # fits all, or one method

Everything is read from the model's own tasks, as `kvjax fit METHOD` reads them, and stored in float16.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

import numpy as np

import kvjax
from kvjax.commands.texts import read_texts
from kvjax.fitted import SHIPPED, save_fitted
from kvjax.fitting import learns_from_questions

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
    "kv-distill": (128, dict(rank=12, epochs=12)),
    "lococo": (32, dict(budget=0.25, slots=16, neighbours=5, epochs=6)),
}
SEED = 7


def fit(model: kvjax.Model, method: str) -> None:
    rows, options = FITS[method]
    texts = read_texts(
        model, text=None, tasks=None, rows=rows, length=512, seed=SEED,
        questions=learns_from_questions(method),
    )  # fmt: skip
    start = time.monotonic()
    found = kvjax.fit(model, method, texts, **options)
    half = {name: np.asarray(x, np.float16) for name, x in found.arrays.items()}
    save_fitted(SHIPPED / MODEL / f"{method}.safetensors", dataclasses.replace(found, arrays=half))
    print(f"{method}: {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    if "--write" in sys.argv:
        model = kvjax.load(MODEL)
        for method in sys.argv[sys.argv.index("--write") + 1 :] or FITS:
            fit(model, method)
    for file in sorted((SHIPPED / MODEL).glob("*.safetensors")):
        print(f"{file.stem:16} {file.stat().st_size / 1024:6.1f} KiB")
