"""The golden record: what every method did on small models, as data that later cores are held to.

`python -m tests.methods.golden --write` makes `tests/fixtures/golden.npz` anew, and with `--missing` records
the cases that it lacks and leaves the others as they are. It is written from a core
whose answers the other tests hold to float64 numpy and to other libraries; whoever changes it says in the
changelog which number moved and why.

A conversation is a prompt of rows of unequal length, its last token asked again, three steps, and, apart from
those, a second turn; and the same prompt read in chunks. Recorded after each part: logits, the positions that
every list holds, and bytes. How many programs each part compiles follows from the method
(`expected_programs`).
"""

from __future__ import annotations

import argparse
import io
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax import steps
from kvjax.base.atomic_files import write_atomic
from kvjax.base.errors import InputError
from kvjax.grammar.fitted import fitted_words
from kvjax.keep.budgets.budget import Threshold
from kvjax.models.config import Config
from kvjax.models.mixers.latent import Latent
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.state.cache import Cache, kept_positions, nbytes
from tests.compilation import optimised
from tests.methods.table import BY_LABEL

RECORD = Path(__file__).parents[1] / "fixtures" / "golden.npz"
VOCAB, ROOM, CHUNK = 64, 16, 16
STEPS = 3
COMPILED = (steps.prefill, steps.read, steps.compress, steps.step, steps.step_keeping)

MODELS = {
    "no groups": dict(layers=3, heads=2, kv_heads=2),
    "groups": dict(layers=3, heads=4, kv_heads=2),
    "windows": dict(layers=4, heads=4, kv_heads=2, windows=(8, None, 8, None)),
    "latents": dict(
        layers=3, heads=4, kv_heads=4, mixers=(Latent(rank=16, rope_dim=8, nope_dim=8, value_dim=16),) * 3
    ),
    "two layers": dict(layers=2, heads=4, kv_heads=2),
}
# The table's fits are to models of this size.
FITTED = "two layers"


@cache
def model(name: str) -> Model:
    config = Config(vocab=VOCAB, d_model=32, head_dim=16, d_ff=48, **MODELS[name])
    return Model(config, init(config, jax.random.key(7)), name=name)


def turns() -> tuple[list[list[int]], np.ndarray, list[list[int]]]:
    """Draw a first turn, the tokens of the steps [STEPS, B], and a second turn."""
    rng = np.random.default_rng(7)
    first, second = (
        [rng.integers(0, VOCAB, n).tolist() for n in lengths] for lengths in ([48, 37, 20], [9, 16, 4])
    )
    return first, rng.integers(0, VOCAB, (STEPS, len(first))), second


def expected_programs(label: str) -> dict[str, int]:
    """How many programs each part compiles: where a method chooses, one reads a prompt and one compresses it.

    Of a prompt in chunks, all but the first are read by the same program, and the first, those in the middle
    and the last are stored or compressed by three; by two, where a threshold may keep all in either tier.
    """
    method = BY_LABEL[label].method()
    keep = method.keep
    alike = keep is not None and keep.lower is not None and isinstance(keep.allocate, Threshold)
    first, chunks = (2, 2 + 3 - alike) if steps.chooses(method) else (1, 3)
    walked = {"step 0": 1} | {f"step {i}": 0 for i in range(1, STEPS)}
    return {"prompt": first, "asked": 1, **walked, "second turn": first, "chunks": chunks}


def forget() -> None:
    for compiled in COMPILED:
        compiled.clear_cache()


def programs() -> int:
    """How many programs of prompts and steps were compiled in this conversation."""
    return sum(f._cache_size() for f in COMPILED)


class Conversation:
    """What one method did on one model: arrays by the name of the part."""

    def __init__(self, label: str, name: str):
        self.found: dict[str, Any] = {}
        self.programs: dict[str, int] = {}
        self.model, self.method = model(name), BY_LABEL[label].method()
        first, tokens, second = turns()
        forget()
        cache = self.prompt("prompt", first, method=self.method)
        self.step("asked", kvjax.fork(cache, 1), [row[-1] for row in first], append=False)
        walked = kvjax.fork(cache, 1)
        for i, token in enumerate(tokens):
            walked = self.step(f"step {i}", walked, token, append=True)
        self.prompt("second turn", second, cache=cache)
        forget()  # A chunk over a full cache may be read like a turn.
        self.prompt("chunks", first, method=self.method, chunk=CHUNK)

    def prompt(self, part: str, rows: list[list[int]], **options: Any) -> Cache:
        before = programs()
        logits, cache = kvjax.prefill(self.model, rows, room=ROOM, **options)
        self.note(part, logits, cache, programs() - before)
        return cache

    def step(self, part: str, cache: Cache, token: Any, append: bool) -> Cache:
        before = programs()
        logits, cache = kvjax.step(self.model, cache, np.asarray(token, np.int32), append=append)
        self.note(part, logits, cache, programs() - before)
        return cache

    def note(self, part: str, logits: jax.Array, cache: Cache, compiled: int) -> None:
        self.found[f"{part}/logits"] = np.asarray(logits, np.float32)
        self.found[f"{part}/held"] = held(cache)
        self.found[f"{part}/bytes"] = np.int64(nbytes(cache))
        self.programs[part] = compiled


def held(cache: Cache) -> np.ndarray:
    """Which positions every list holds, in any slot: one string of bits [layers, B, K, positions], packed."""
    layers = kept_positions(cache)
    most = 1 + max(int(p.max(initial=0)) for p in layers)
    lists = max(p.shape[1] for p in layers)
    bits = np.zeros((len(layers), layers[0].shape[0], lists, most), bool)
    for layer, positions in enumerate(layers):
        rows, heads, slots = np.nonzero(positions >= 0)
        bits[layer, rows, heads, positions[rows, heads, slots]] = True
    return np.packbits(bits, axis=-1)


def cases() -> list[tuple[str, str]]:
    """Every method on every model that it fits, which `kvjax.prefill` decides; only fits on theirs."""
    return [(label, name) for name in MODELS for label in BY_LABEL if name != FITTED or has_fit(label)]


def has_fit(label: str) -> bool:
    """Whether a row of the table has fitted arrays."""
    return any(word.fitted is not None for word in fitted_words(BY_LABEL[label].method()))


def converse(label: str, name: str) -> Conversation | str:
    """Hold the conversation of a case, or say why the method does not fit the model."""
    try:
        return Conversation(label, name)
    except InputError as error:
        return str(error)


def recorded() -> dict[str, np.ndarray]:
    with np.load(RECORD) as arrays:
        # Numbers of programs were recorded too, until they followed from the method.
        return {key: arrays[key] for key in arrays if not key.endswith("/programs")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the record")
    parser.add_argument("--missing", action="store_true", help="only the cases that are not recorded yet")
    parser.add_argument("--again", nargs="+", default=[], metavar="METHOD", help="with --missing: these, too")
    args = parser.parse_args()
    arrays: dict[str, Any] = recorded() if args.missing else {}
    arrays = {key: x for key, x in arrays.items() if key.split("/")[0] not in args.again}
    known = {tuple(key.split("/")[:2]) for key in arrays}
    for label, name in cases():
        if (label, name) in known:
            continue
        found = converse(label, name)
        print(f"{label} on {name}: {found if isinstance(found, str) else 'recorded'}", flush=True)
        if isinstance(found, str):
            arrays[f"{label}/{name}/refused"] = np.asarray(found)
        else:
            arrays |= {f"{label}/{name}/{part}": x for part, x in found.found.items()}
        if args.write and args.missing:
            save(arrays)
    if args.write:
        save(arrays)


def save(arrays: dict[str, Any]) -> None:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    write_atomic(RECORD, file.getvalue())


if __name__ == "__main__":
    # As the tests, which hold it to the same numbers: most of the time is the compiler's.
    with optimised(False):
        main()
