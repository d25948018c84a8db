"""Shared by tests of pairs of methods: a lossless codec, methods without checks, and their outputs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import numpy as np

import kvjax
from kvjax.compat import model_fit, store_fit
from kvjax.grammar import Method, Store, chains
from kvjax.state.cache import Cache
from kvjax.state.codes import Codec
from tests.methods.battery import ROOM, model

PROMPTS = [np.random.default_rng(n).integers(0, 64, n).tolist() for n in (40, 29)]
STEPS = np.random.default_rng(2).integers(0, 64, (6, len(PROMPTS)))


@dataclasses.dataclass(frozen=True)
class Exact(Codec):
    """Stores rows unencoded, `granule` tokens at a time, so that only the layout of slots is tested."""

    granule: int = 1

    def encode(self, x: Any) -> dict[str, Any]:
        return {"x": x}

    def decode(self, data: dict[str, Any], width: int, dtype: Any) -> Any:
        return data["x"].astype(dtype)


def exact(granule: int = 1, **more: Any) -> Method:
    """Make a lossless store."""
    return Method(store=Store(Exact(granule), Exact(granule), **more))


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Within the block, methods are built and run without the checks of their words and of the model."""
    left_out = [(chains, "check"), (store_fit, "refuse")]
    left_out += [(model_fit, name) for name in ("check", "crowded", "refuse")]
    model_fit.check_fit.cache_clear()
    with contextlib.ExitStack() as stack:
        stack.callback(model_fit.check_fit.cache_clear)
        for module, name in left_out:
            stack.enter_context(mock.patch.object(module, name, lambda *_: None))
        yield


@cache
def answers(method: Method, checked: bool = True) -> tuple[np.ndarray, Cache]:
    """Compute the logits [1 + steps, B, V] of the prompts and of a few steps, and the cache then."""
    return talked(method, PROMPTS, checked)


def talked(
    method: Method, prompts: list[list[int]], checked: bool = True, name: str = "4/2"
) -> tuple[np.ndarray, Cache]:
    with contextlib.nullcontext() if checked else unchecked():
        logits, cache = kvjax.prefill(model(name), prompts, method=method, room=ROOM)
        found = [logits]
        for tokens in STEPS:
            logits, cache = kvjax.step(model(name), cache, tokens)
            found.append(logits)
    return np.stack(found), cache


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """Find the largest difference of logits, relative to the largest."""
    return float(np.abs(a - b).max() / np.abs(b).max())
