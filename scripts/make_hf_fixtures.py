"""Writes tests/fixtures/hf: tiny checkpoints of every family with the logits that transformers computes.

    python -m scripts.make_hf_fixtures

Run in the repository root with the `parity` extra; the plain suite then needs neither torch nor transformers.
An .npz holds the config.json, the weights (bfloat16 bits, by tensor name), token ids [1, T] and float32
logits [1, T, V].
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from tests.models import hf_reference
from tests.models.hf_cases import CASES, TOKENS

FOLDER = Path(__file__).parents[1] / "tests" / "fixtures" / "hf"


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.npz"):
        old.unlink()
    for seed, (name, case) in enumerate(CASES.items()):
        with tempfile.TemporaryDirectory() as folder:
            model = hf_reference.build(case, Path(folder), seed)
            # Saved, because the classes keep experts under other names than checkpoints do.
            model.save_pretrained(folder)
            weights = load_file(Path(folder) / "model.safetensors")
        tokens = np.random.default_rng(seed).integers(0, case["vocab_size"], (1, TOKENS)).astype(np.int32)
        bits = {n: w.to(torch.bfloat16).view(torch.uint16).numpy() for n, w in weights.items()}
        logits = hf_reference.logits(model, tokens)
        np.savez_compressed(
            FOLDER / f"{name}.npz", config=json.dumps(case), tokens=tokens, logits=logits, **bits
        )
    total = sum(file.stat().st_size for file in FOLDER.glob("*.npz"))
    print(f"{len(CASES)} fixtures, {total / 1e6:.2f} MB in {FOLDER}")


if __name__ == "__main__":
    main()
