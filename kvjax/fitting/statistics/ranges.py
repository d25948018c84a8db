"""Ranges of keys and values that are found once, for codes without scales of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jaxtyping import Float

from kvjax.base.errors import InputError
from kvjax.fitting.loops.keys_values import read_keys_values
from kvjax.fitting.statistics.levels import only_slots
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.models.model import Model
from kvjax.state.code_forms import span_of
from kvjax.store.fixed import StaticAffine

Numbers = Float[np.ndarray, "L K T H"]
# The arrays "low" and "step" of every head.
Found = tuple[Float[np.ndarray, "L K"], Float[np.ndarray, "L K"]]
# Shares of a range that are tried as the range.
TRIED = np.linspace(0.01, 1, 100)


def fit_ranges(
    model: Model,
    batches: list[list[list[int]]],
    *,
    method: Method,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the method's ranges to a model by the rule of its paper, in one pass over the texts.

    Rows are those that the codec encodes: after a rotation if one comes first, and without the first tokens
    of a text that stay unencoded. Raises InputError for a model whose layers are not all plain attention with
    slots of their own, for a method whose rule is not known, and if no token is encoded.
    """
    only_slots(model, "ranges")
    store, width = method.store, model.config.head_dim
    assert store is not None
    encoded = np.concatenate([np.arange(len(row)) >= store.sinks for rows in batches for row in rows])
    if not encoded.any():
        raise InputError(f"texts have at most {store.sinks} tokens, which stay unencoded: give longer texts")
    read = read_keys_values(model, batches, progress, store.unrotated)
    found: dict[str, np.ndarray] = {}
    for of, codec, x in (("key", store.keys, read.k), ("value", store.values, read.v)):
        if codec is None or not isinstance(inner := span_of(codec, width).codec, StaticAffine):
            continue
        if inner.by not in RULES:
            raise InputError(f"no rule is known for the range of {inner.by}, expected {', '.join(RULES)}")
        matrix = np.asarray(span_of(codec, width).matrix, np.float64)
        rows = x[:, :, encoded].astype(np.float64) @ np.linalg.inv(matrix)
        low, step = RULES[inner.by](rows, inner.bits)
        found |= {f"{of} low": low.astype(np.float32), f"{of} step": step.astype(np.float32)}
    return Fitted(found, "StaticAffine", model.signature)


def largest_of_layer(x: Numbers, bits: int) -> Found:
    """SmoothQuant: integers times max |x| / (2^(bits - 1) - 1), for all heads of a layer together."""
    return _around_zero(np.abs(x).max((1, 2, 3)), x.shape[1], bits)


def closest_of_layer(x: Numbers, bits: int) -> Found:
    """4-bit training: of the steps that are tried, the one of least error over all heads of a layer."""
    most = np.abs(x).max((1, 2, 3))
    error = np.stack([_lost(x, *_around_zero(most * part, x.shape[1], bits), bits).sum(1) for part in TRIED])
    return _around_zero(most * TRIED[error.argmin(0)], x.shape[1], bits)


def closest_of_head(x: Numbers, bits: int) -> Found:
    """PrefixQuant: of the steps that are tried, the one of least error for each head.

    Tried are 1, 0.95, ... 0.55 times 2 max |x| / (2^bits - 1), as in the authors' code.
    """
    tried = np.linspace(1, 0.55, 10)[:, None, None] * 2 * np.abs(x).max((2, 3)) / (2**bits - 1)
    error = np.stack([_lost(x, -(2 ** (bits - 1)) * step, step, bits) for step in tried])
    step = np.take_along_axis(tried, error.argmin(0)[None], 0)[0]
    return -(2 ** (bits - 1)) * step, step


def _around_zero(most: Float[np.ndarray, "L"], heads: int, bits: int) -> Found:
    """Return the range of integers times a step, if `most` is 2^(bits - 1) - 1 steps."""
    step = np.repeat((most / max(2 ** (bits - 1) - 1, 1))[:, None], heads, 1)
    return -(2 ** (bits - 1)) * step, step


def _lost(x: Numbers, low: np.ndarray, step: np.ndarray, bits: int) -> Float[np.ndarray, "L K"]:
    """Compute the squared error of each head's numbers that are encoded and decoded."""
    low, step = (a[..., None, None] for a in (low, np.where(step > 0, step, 1.0)))
    code = np.clip(np.rint((x - low) / step), 0, 2**bits - 1)
    return np.square(code * step + low - x).sum((2, 3))


RULES: dict[str, Callable[[Numbers, int], Found]] = {
    "smoothquant": largest_of_layer,
    "q-int4": closest_of_layer,
    "prefixquant": closest_of_head,
}
