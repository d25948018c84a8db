"""The checkpoints of tests/fixtures/hf as Hugging Face directories, written by the safetensors library."""

import json
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

FOLDER = Path(__file__).parents[1] / "fixtures" / "hf"
NAMES = sorted(file.stem for file in FOLDER.glob("*.npz"))
BAR = 2e-4
"""Largest difference of two float32 implementations' logits, relative to the largest logit."""


class Fixture(NamedTuple):
    """config.json, float32 weights by tensor name, token ids [1, T], logits [1, T, V]."""

    config: dict
    weights: dict[str, np.ndarray]
    tokens: np.ndarray
    logits: np.ndarray


def read(name: str) -> Fixture:
    with np.load(FOLDER / f"{name}.npz") as file:
        data = {key: file[key] for key in file.files}
    config, tokens, logits = json.loads(str(data.pop("config"))), data.pop("tokens"), data.pop("logits")
    weights = {key: bits.view(ml_dtypes.bfloat16).astype(np.float32) for key, bits in data.items()}
    return Fixture(config, weights, tokens, logits)


def write(fixture: Fixture, folder: Path, shards: int = 1, index: bool = True) -> Path:
    """Write the fixture as a directory; with several shards, with or without their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fixture.config))
    if shards == 1:
        save_file(fixture.weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    place = {
        name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors"
        for i, name in enumerate(fixture.weights)
    }
    for file in set(place.values()):
        save_file({n: w for n, w in fixture.weights.items() if place[n] == file}, folder / file)
    if index:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": place})
        )
    return folder


def relative_error(found: object, expected: np.ndarray) -> float:
    """max|difference| / max|expected|."""
    return float(np.abs(np.asarray(found, np.float32) - expected).max() / np.abs(expected).max())
