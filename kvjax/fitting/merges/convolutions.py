"""Fits convolutions that mix evicted tokens into a few slots (LoCoCo, arXiv:2406.05317)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from kvjax.fitting.loops.cuts import KeptBeforeCut, after_cuts
from kvjax.fitting.loops.descent import Arrays, descended, uniform
from kvjax.fitting.loops.whole import check_whole
from kvjax.fitting.merges.residue import ResidueBatch, cut, kept_before
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.kinds import Inputs
from kvjax.keep.merges.merge_conv import ConvMerge, mixed
from kvjax.keep.scores.score import probabilities
from kvjax.models.attending import rotated
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer
from kvjax.models.model import Model
from kvjax.ops.attention.union import Keys


def fit_convolutions(
    model: Model,
    batches: list[list[list[int]]],
    *,
    method: Method,
    slots: int = 64,
    neighbours: int = 21,
    rate: float = 1e-2,
    epochs: int = 4,
    seed: int = 0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the convolution of every layer, which makes `slots` mixtures from windows of `neighbours` tokens.

    Every text is cut at a random place between a quarter and three quarters of it, which differs from epoch
    to epoch; what is before the cut is compressed by the method, and the loss is the negative log-likelihood
    of what is after it. Adam (arXiv:1412.6980) takes one step per batch at learning rate `rate`, in `epochs`
    passes over the batches; the model is not trained. Raises InputError for a model whose layers are not all
    plain attention that keeps all tokens, for a keep of unequal heads, and for a budget under which nothing
    is evicted.
    """
    check_whole(model, "convolutions")
    assert method.keep is not None and isinstance(method.keep.merge, ConvMerge)
    run, draw = kept_before(model, method, batches), np.random.default_rng(seed)
    newest = method.keep.merge.newest

    def loss(arrays: Arrays, batch: ResidueBatch, params: Params) -> Float[Array, ""]:
        return surprise(model.config, newest, params, arrays, batch)

    read = (cut(model, run, rows, draw) for rows in progress([x for _ in range(epochs) for x in batches]))
    arrays = drawn(model.config, slots, neighbours, seed)
    return Fitted(descended(loss, arrays, read, model.params, rate=rate), "ConvMerge", model.signature)


def drawn(config: Config, slots: int, neighbours: int, seed: int) -> Arrays:
    """Draw the initial convolutions; `share` is 0.5: a slot becomes half itself, half mixture."""
    keys, width = jax.random.split(jax.random.key(seed)), 2 * config.head_dim
    return {
        "conv": uniform(keys[0], (config.layers, neighbours, width, slots), neighbours * width),
        "conv_bias": uniform(keys[1], (config.layers, slots), neighbours * width),
        "share": jnp.full((config.layers,), 0.5),
    }


def surprise(
    config: Config, newest: int, params: Params, arrays: Arrays | None, batch: ResidueBatch
) -> Float[Array, ""]:
    """Compute the mean negative log-likelihood of the tokens after cuts, given compressed tokens before.

    arrays: None to mix nothing, so that evicted tokens are dropped.
    """

    def leaving(layer: Layer, inputs: Inputs, keys: Keys, s: Array, before: Array) -> KeptBeforeCut:
        kept, k, v = batch.kept[layer.number], keys.k, inputs.v
        assert inputs.k_raw is not None and v is not None
        gone = before[:, None] & ~kept
        if arrays is not None:
            received = jnp.where(before[:, None, None, :, None], probabilities(s), 0.0).sum((2, 3))
            mine = {n: x[layer.number] for n, x in arrays.items()}
            pos = jnp.broadcast_to(inputs.pos[:, None], gone.shape)
            old = kept & (inputs.pos < batch.cuts[:, None] - newest)[:, None]
            raw, v, takes = mixed(mine, inputs.k_raw, v, pos, old, gone, received)
            k = jnp.where(takes[..., None], rotated(layer.rope, raw, inputs.pos, inputs.length), k)
        return KeptBeforeCut(k, v, jnp.where(gone, -jnp.inf, 0.0))

    said, later, _ = after_cuts(config, params, batch, leaving, "convolutions")
    each = optax.softmax_cross_entropy_with_integer_labels(said[:, :-1], batch.tokens[:, 1:])
    counts = later[:, :-1] & later[:, 1:]
    return jnp.where(counts, each, 0.0).sum() / jnp.maximum(counts.sum(), 1).astype(jnp.float32)
