"""Linear maps from the layer below to a layer's keys and values, one layer after the other (AQUA-KV)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from kvjax.base.errors import InputError
from kvjax.fitting.loops.keys_values import read_keys_values
from kvjax.fitting.statistics.levels import only_slots
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted, sees_below
from kvjax.models.model import Model
from kvjax.state.codes import at_layer, dense, encode
from kvjax.store.predicted import PredictedCodec

# Added to the diagonal of the inputs' second moments, as a share of its mean.
RIDGE = 1e-3


def fit_predictors(
    model: Model,
    batches: list[list[list[int]]],
    *,
    method: Method,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the maps of all layers by ridge regression, in one pass (arXiv:2501.19392, section 3.2).

    A layer's inputs are the rows of the layer below as decoded from the method's own codes, so that the maps
    also correct the errors of lower layers. Raises InputError for a model whose layers are not all plain
    attention with slots of their own, and for a method that has no predictor.
    """
    only_slots(model, "predictors")
    store = method.store
    if store is None or not sees_below((store.keys, store.values)):
        raise InputError(f"{method.id} encodes no layer by the one below it: give aqua-kv")
    read = read_keys_values(model, batches, progress, raw=store.unrotated)
    layers, heads, _, width = read.k.shape
    size = heads * width
    out = {
        "key weights": np.zeros((layers, size, size)), "key bias": np.zeros((layers, size)),
        "value weights": np.zeros((layers, 2 * size, size)), "value bias": np.zeros((layers, size)),
    }  # fmt: skip
    below: tuple[np.ndarray, np.ndarray] | None = None
    for i in progress(range(layers)):
        k, v = (_flat(x[i]) for x in (read.k, read.v))
        near = np.zeros_like(k)
        if below is not None:
            out["key weights"][i], out["key bias"][i], near = _regressed(below[0], k)
        own = near + _through(at_layer(store.keys, i), k - near, heads)
        near = np.zeros_like(v)
        if below is not None:
            given = np.concatenate([own, below[1]], 1)
            out["value weights"][i], out["value bias"][i], near = _regressed(given, v)
        below = own, near + _through(at_layer(store.values, i), v - near, heads)
    return Fitted({n: x.astype(np.float32) for n, x in out.items()}, "Predicted", model.signature)


def _flat(x: Float[np.ndarray, "K T H"]) -> Float[np.ndarray, "T KH"]:
    return np.moveaxis(x, 0, 1).reshape(x.shape[1], -1).astype(np.float64)


def _regressed(
    x: Float[np.ndarray, "T I"], y: Float[np.ndarray, "T O"]
) -> tuple[Float[np.ndarray, "I O"], Float[np.ndarray, "O"], Float[np.ndarray, "T O"]]:
    """W, b and x W + b, of least squared error but for a ridge."""
    mean, mine = x.mean(0), y.mean(0)
    centred = x - mean
    moments = centred.T @ centred
    ridge = RIDGE * max(np.trace(moments) / len(moments), 1e-30) * np.eye(len(moments))
    weights = np.linalg.solve(moments + ridge, centred.T @ (y - mine))
    bias = mine - mean @ weights
    return weights, bias, x @ weights + bias


def _through(codec: Any, x: Float[np.ndarray, "T KH"], heads: int) -> Float[np.ndarray, "T KH"]:
    """Encode and decode rows; the last ones, which fill no whole granule, are unchanged."""
    while isinstance(codec, PredictedCodec):
        codec = codec.codec
    if codec is None:
        return x
    whole = len(x) // codec.granule * codec.granule
    rows = jnp.moveaxis(jnp.asarray(x[:whole], jnp.float32).reshape(1, whole, heads, -1), 1, 2)
    back = np.moveaxis(np.asarray(dense(encode(rows, codec)), np.float64), 2, 1).reshape(whole, -1)
    return np.concatenate([back, x[whole:]])
