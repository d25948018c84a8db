"""Prompts on which the code of methods' authors was run, and the slots that it kept.

`scripts/fixtures/record_*.py` write the files of `tests/fixtures/authors`: each takes the path of a checkout
of the authors' repository, runs its code on `prompt(row)`, and calls `write`. `test_recorded.py` compares
every case with what kvjax keeps. Weights and tokens are numpy's draws, which no version of jax changes.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import kvjax
from kvjax.grammar.refuse_keep import crowded
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from tests.float64.reference import Decoder, Prompt

FOLDER = Path(__file__).parents[1] / "fixtures" / "authors"
# With a window of 8 tokens: at a budget of 0.25, n is three windows, and less than two of all rows but the
# first; at 0.75, all rows but the last are shorter than 2 (n - window).
LENGTHS = (96, 57, 40, 32)
VOCAB = 64


class Case(NamedTuple):
    """A method, its hyper-parameters, and per row that the authors' code takes: per layer, bool [K, T].

    The code of authors that choose once for a layer has a list for each KV head all the same.
    """

    id: str
    hyper: dict[str, Any]
    kept: dict[int, list[np.ndarray]]

    @property
    def name(self) -> str:
        return ",".join([self.id, *(f"{name}={value}" for name, value in self.hyper.items())])


@cache
def model() -> Model:
    """Build a decoder of two layers whose attention is far from even."""
    config = Config(vocab=VOCAB, d_model=32, head_dim=16, d_ff=48, layers=2, heads=4, kv_heads=2)
    shapes = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    rng = np.random.default_rng(45)

    def drawn(path: Any, x: Any) -> np.ndarray:
        if "norm" in jax.tree_util.keystr(path):
            return np.ones(x.shape, np.float32)
        scale = 1.0 if "embed" in jax.tree_util.keystr(path) else 1.5 / np.sqrt(x.shape[-2])
        return (scale * rng.standard_normal(x.shape)).astype(np.float32)

    return Model(config, jax.tree_util.tree_map_with_path(drawn, shapes))


@cache
def tokens() -> list[list[int]]:
    rng = np.random.default_rng(46)
    return [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]


@cache
def prompt(row: int) -> Prompt:
    """Read a row in float64, which the authors' code is given."""
    return Prompt(Decoder(model()), tokens()[row])


def output_matrix(layer: int) -> np.ndarray:
    """W_O [N H, D] of a layer, in float64."""
    return Decoder(model()).layers[layer]["o"]


def kept_by_kvjax(id: str, hyper: dict[str, Any]) -> dict[int, list[np.ndarray]]:
    """Per row and layer, which tokens [K, T] a compressed prompt holds.

    Rows are left out that kvjax refuses, because more tokens must stay than their budget holds.
    """
    method = kvjax.method(id, **hyper)
    rows = [row for row, length in enumerate(LENGTHS) if not crowded(method.keep, length)]
    _, cache = kvjax.prefill(model(), [tokens()[row] for row in rows], method=method)
    layers = jax.device_get(kvjax.kept_positions(cache))

    def held(pos: np.ndarray, length: int) -> np.ndarray:
        return np.stack([np.isin(np.arange(length), mine) for mine in pos])

    return {row: [held(layer[i], LENGTHS[row]) for layer in layers] for i, row in enumerate(rows)}


def commit_of(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def version_of(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"


def write(name: str, source: str, cases: list[Case], numbers: dict[str, np.ndarray] | None = None) -> None:
    """Write the fixture `name`, with the commit or the version that ran; numbers: what else it computed."""
    meta = {"source": source, "cases": [[case.id, case.hyper] for case in cases]}
    arrays = {
        f"{i}/{row}": np.packbits(np.stack(layers), axis=-1)
        for i, case in enumerate(cases)
        for row, layers in case.kept.items()
    }
    np.savez_compressed(FOLDER / f"{name}.npz", meta=np.array(json.dumps(meta)), **arrays, **(numbers or {}))


@cache
def numbers(name: str) -> dict[str, np.ndarray]:
    """Read what the fixture `name` has beside its cases."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


@cache
def cases() -> dict[str, Case]:
    """All that is recorded, by the file's and the case's name."""
    found = {}
    for path in sorted(FOLDER.glob("*.npz")):
        with np.load(path) as file:
            for i, (id, hyper) in enumerate(json.loads(str(file["meta"]))["cases"]):
                rows = {
                    row: list(np.unpackbits(file[f"{i}/{row}"], axis=-1, count=length).astype(bool))
                    for row, length in enumerate(LENGTHS)
                    if f"{i}/{row}" in file
                }
                case = Case(id, hyper, rows)
                found[f"{path.stem}: {case.name}"] = case
    return found
