"""Bases of keys and values, by what a few texts show of a head's channels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jaxtyping import Float

from kvjax.base.errors import InputError
from kvjax.fitting.loops.keys_values import read_keys_values
from kvjax.fitting.statistics.asked_bases import by_attention
from kvjax.fitting.statistics.basis_rules import BasisInputs, Numbers, paired, scaled
from kvjax.fitting.statistics.learnt_bases import affine, flat, rotated, scaled_keys, shifted
from kvjax.fitting.statistics.levels import only_slots, words_of
from kvjax.fitting.statistics.queries import QuerySums, summed_queries
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.models.model import Model
from kvjax.steps import Run
from kvjax.store.basis import InBasisCodec


def fit_basis(
    model: Model,
    batches: list[list[list[int]]],
    *,
    method: Method,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the method's bases to a model, by the rule of its paper, in one pass over the texts.

    Raises InputError for a model whose layers are not all plain attention with slots of their own, and for a
    method whose rule is not known.
    """
    only_slots(model, "bases")
    held = [word for word in words_of(method) if isinstance(word, InBasisCodec)]
    for one in held:
        if one.word.by not in RULES:
            raise InputError(f"no rule is known for the basis of {one.word.by}, expected {', '.join(RULES)}")
    raw = method.store is not None and method.store.unrotated
    read = read_keys_values(model, batches, progress, raw)
    rope = Run(model.config, Method()).attention_spec(0).rope
    queries = None
    if any(one.word.by in ASKING for one in held):
        queries = _moments(model, batches, not raw)
    found: dict[str, np.ndarray] = {}
    for one in held:
        of = one.word.of
        x = read.k if of == "key" else read.v
        meant = BasisInputs(of, rope if of == "key" and not raw else None, one.codec, read.k, queries)
        arrays = RULES[one.word.by](x, meant)
        found |= {f"{of} {name}": a.astype(np.float32) for name, a in arrays.items()}
    return Fitted(found, "InBasis", model.signature)


def _moments(model: Model, batches: list[list[list[int]]], rotated: bool) -> Float[np.ndarray, "L K H H"]:
    """Compute the mean of q q' over all tokens and the query heads of a KV head."""
    count, _, moments = summed_queries(model, batches, QuerySums(rotated), iter, "bases")
    layers, _, width, _ = moments.shape
    grouped = moments.reshape(layers, model.config.kv_heads, -1, width, width).mean(2)
    return grouped / np.maximum(count, 1.0)[:, None, None, None]


def smooth(x: Numbers, meant: BasisInputs) -> dict[str, np.ndarray]:
    """QServe: scales channels by the root of their largest magnitude, equal for both of a RoPE pair."""
    return scaled(paired(np.abs(x).max(2), meant.rope) ** 0.5)


def principal(x: Numbers, meant: BasisInputs) -> dict[str, np.ndarray]:
    """ResQ: the eigenvectors of a head's second moments, the directions of the largest first."""
    wide = x.astype(np.float64)
    vectors = np.linalg.eigh(np.swapaxes(wide, -1, -2) @ wide)[1][..., ::-1]
    return {"matrix": np.swapaxes(vectors, -1, -2), "inverse": vectors}


RULES: dict[str, Callable[[Numbers, BasisInputs], dict[str, np.ndarray]]] = {
    "qserve": smooth,
    "resq": principal,
    "flatquant": flat,
    "spinquant": rotated,
    "omniquant": scaled_keys,
    "wkvquant": shifted,
    "affinequant": affine,
    "oscar": by_attention,
}
# Rules that look at queries.
ASKING = frozenset({"oscar"})
