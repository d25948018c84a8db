"""What tests of pairs of methods share: a lossless codec, sentences without their checks, answers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

import kvjax
from kvjax.compat import model_fit
from kvjax.grammar import Method, Store, chains
from kvjax.state.cache import Cache
from tests.methods.battery import ROOM, model

PROMPTS = [np.random.default_rng(n).integers(0, 64, n).tolist() for n in (40, 29)]
STEPS = np.random.default_rng(2).integers(0, 64, (6, len(PROMPTS)))


@dataclasses.dataclass(frozen=True)
class Exact:
    """Rows as they are, `granule` tokens at a time: what is left of a sentence is where slots lie."""

    granule: int = 1

    def encode(self, x: Any) -> dict[str, Any]:
        return {"x": x}

    def decode(self, data: dict[str, Any], width: int, dtype: Any) -> Any:
        return data["x"].astype(dtype)


def exact(granule: int = 1, **more: Any) -> Method:
    """A store that loses nothing."""
    return Method(store=Store(Exact(granule), Exact(granule), **more))


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Sentences are built and run whatever their words say of each other."""
    held = chains.check, model_fit.check
    chains.check = model_fit.check = lambda method: None
    model_fit.check_fit.cache_clear()
    try:
        yield
    finally:
        chains.check, model_fit.check = held
        model_fit.check_fit.cache_clear()


@cache
def answers(method: Method, checked: bool = True) -> tuple[np.ndarray, Cache]:
    """The logits [1 + steps, B, V] of the prompts and of a few steps, and the cache then."""
    return talked(method, PROMPTS, checked)


def talked(method: Method, prompts: list[list[int]], checked: bool = True) -> tuple[np.ndarray, Cache]:
    with contextlib.nullcontext() if checked else unchecked():
        logits, cache = kvjax.prefill(model("4/2"), prompts, method=method, room=ROOM)
        found = [logits]
        for tokens in STEPS:
            logits, cache = kvjax.step(model("4/2"), cache, tokens)
            found.append(logits)
    return np.stack(found), cache


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """How far logits lie apart, relative to the largest."""
    return float(np.abs(a - b).max() / np.abs(b).max())
