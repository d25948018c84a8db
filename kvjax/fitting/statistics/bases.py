"""Bases of keys and values that need no gradients: scales and shifts by what a few texts show of channels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jaxtyping import Float

from kvjax.base.errors import InputError
from kvjax.fitting.loops.numbers import read_numbers
from kvjax.fitting.statistics.levels import only_slots, words_of
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.models.model import Model
from kvjax.ops.base.rope import Rope
from kvjax.steps import Run
from kvjax.store.basis import InBasis

Numbers = Float[np.ndarray, "L K T H"]


def fit_basis(
    model: Model,
    batches: list[list[list[int]]],
    *,
    method: Method,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """What the method's bases are of a model, by the rule of its paper, in one reading of texts.

    Raises InputError for a model whose layers are not all plain attention with slots of their own.
    """
    only_slots(model, "bases")
    words = [word for word in words_of(method) if isinstance(word, InBasis)]
    read = read_numbers(model, batches, progress)
    rope = Run(model.config, Method()).attention_spec(0).rope
    found: dict[str, np.ndarray] = {}
    for word in words:
        if word.by not in RULES:
            raise InputError(f"no rule is known for the basis of {word.by}, expected {', '.join(RULES)}")
        x = read.k if word.of == "key" else read.v
        arrays = RULES[word.by](x, rope if word.of == "key" else None)
        found |= {f"{word.of} {name}": a.astype(np.float32) for name, a in arrays.items()}
    return Fitted(found, "InBasis", model.signature)


def smooth(x: Numbers, rope: Rope | None, alpha: float = 0.5) -> dict[str, np.ndarray]:
    """QServe: lambda_c = max |x_c|^alpha, of pairs of channels that RoPE turns the larger of both."""
    return scaled(paired(np.abs(x).max(2), rope) ** alpha)


def paired(most: Float[np.ndarray, "*b H"], rope: Rope | None) -> Float[np.ndarray, "*b H"]:
    """`most` with both channels of a turning pair at their larger one; as it is where nothing turns."""
    out = most.copy()
    if rope is None:
        return out
    half = rope.turning(most.shape[-1]) // 2
    a, b = (slice(rope.start + i * half, rope.start + (i + 1) * half) for i in (0, 1))
    out[..., a] = out[..., b] = np.maximum(most[..., a], most[..., b])
    return out


def scaled(by: Float[np.ndarray, "L K H"]) -> dict[str, np.ndarray]:
    """The basis in which channels are divided by `by`; a channel of zeros stays as it is."""
    by, one = np.where(by > 0, by, 1.0), np.eye(by.shape[-1])
    return {"matrix": by[..., None] * one, "inverse": one / by[..., None]}


RULES: dict[str, Callable[[Numbers, Rope | None], dict[str, np.ndarray]]] = {"qserve": smooth}
