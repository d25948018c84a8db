"""Bases of keys and values, fitted to the distribution of a head's channels in a few texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from kvjax.base.errors import InputError
from kvjax.fitting.loops.bases import flat
from kvjax.fitting.loops.numbers import read_numbers
from kvjax.fitting.statistics.levels import only_slots, words_of
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.models.model import Model
from kvjax.ops.base.rope import Rope
from kvjax.state.codes import Codec
from kvjax.steps import Run
from kvjax.store.affine import Affine
from kvjax.store.basis import Based

Numbers = Float[np.ndarray, "L K T H"]


class Meant(NamedTuple):
    """What a basis is for: the rotation of the keys (None if it does not matter), and the codec."""

    rope: Rope | None
    codec: Codec


def fit_basis(
    model: Model,
    batches: list[list[list[int]]],
    *,
    method: Method,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fits the method's bases to a model, by the rule of its paper, in one pass over the texts.

    Raises InputError for a model whose layers are not all plain attention with slots of their own, and for a
    method whose rule is not known.
    """
    only_slots(model, "bases")
    held = [word for word in words_of(method) if isinstance(word, Based)]
    for one in held:
        if one.word.by not in RULES:
            raise InputError(f"no rule is known for the basis of {one.word.by}, expected {', '.join(RULES)}")
    raw = method.store is not None and method.store.unrotated
    read = read_numbers(model, batches, progress, raw)
    rope = Run(model.config, Method()).attention_spec(0).rope
    found: dict[str, np.ndarray] = {}
    for one in held:
        of = one.word.of
        x = read.k if of == "key" else read.v
        arrays = RULES[one.word.by](x, Meant(rope if of == "key" and not raw else None, one.codec))
        found |= {f"{of} {name}": a.astype(np.float32) for name, a in arrays.items()}
    return Fitted(found, "InBasis", model.signature)


def smooth(x: Numbers, meant: Meant) -> dict[str, np.ndarray]:
    """QServe: scales channels by the root of their largest magnitude, equal for both of a RoPE pair."""
    return scaled(paired(np.abs(x).max(2), meant.rope) ** 0.5)


def principal(x: Numbers, meant: Meant) -> dict[str, np.ndarray]:
    """ResQ: the eigenvectors of a head's second moments, the directions of the largest first."""
    wide = x.astype(np.float64)
    vectors = np.linalg.eigh(np.swapaxes(wide, -1, -2) @ wide)[1][..., ::-1]
    return {"matrix": np.swapaxes(vectors, -1, -2), "inverse": vectors}


def in_order(x: Numbers, meant: Meant) -> dict[str, np.ndarray]:
    """SKVQ: sorts channels by their ranges, so that those of one group are alike."""
    order = np.argsort(x.max(2) - x.min(2), -1, kind="stable")
    permutation = np.eye(x.shape[-1])[order]
    return {"matrix": permutation, "inverse": np.swapaxes(permutation, -1, -2)}


def learnt(x: Numbers, meant: Meant) -> dict[str, np.ndarray]:
    """FlatQuant: the matrix in whose basis the method's codes lose least, by gradients through the codes."""
    codec = meant.codec
    if not isinstance(codec, Affine) or codec.axis != "token" or codec.group is not None:
        raise InputError(f"a basis is learnt through an Affine of whole tokens, and {codec!r} was given")
    return flat(x, codec.bits, codec.clip)


def paired(most: Float[np.ndarray, "*b H"], rope: Rope | None) -> Float[np.ndarray, "*b H"]:
    """`most`, with the larger of both channels for each pair that RoPE rotates; unchanged without it."""
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


RULES: dict[str, Callable[[Numbers, Meant], dict[str, np.ndarray]]] = {
    "qserve": smooth,
    "resq": principal,
    "skvq": in_order,
    "flatquant": learnt,
}
