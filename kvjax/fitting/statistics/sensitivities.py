"""By how much the perplexity of texts grows if channels of one layer are left out (KVPruner)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.api.prefill import padded
from kvjax.base.errors import InputError
from kvjax.compat.model_fit import check_fit
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.make.pruned_channels import PrunedChannels
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.models.params import plan, regroup
from kvjax.models.transformer import forward


def fit_sensitivities(
    model: Model,
    batches: list[list[list[int]]],
    *,
    method: Method,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit "perplexity" [L] of `PrunedChannels`: what leaving out one layer's channels adds to perplexity.

    Perplexity is exp of the mean negative log-likelihood of all tokens after the first of each text. Each
    batch is read once as it is and once for every layer. Raises InputError for a model whose layers are not
    all plain attention, and for texts of one token.
    """
    word = method.make
    assert isinstance(word, PrunedChannels)
    plain = PrunedChannels(word.keep)
    check_fit(Method(make=plain), model.config)
    pruned = [without_channels(plain, model.params, model.config, i) for i in range(model.config.layers)]
    total, tokens = np.zeros(model.config.layers + 1), 0
    for rows in progress(batches):
        batch = padded(model, rows, None, least=2)
        given = jnp.asarray(batch.tokens), jnp.asarray(batch.lengths)
        each = [_loss(model.config, params, *given) for params in (model.params, *pruned)]
        total += np.asarray(jnp.stack(each), np.float64)
        tokens += int(batch.lengths.sum()) - len(rows)
    perplexity = np.exp(total / tokens)
    if not np.isfinite(perplexity).all():
        raise InputError("the perplexity of the texts is not finite: give other texts")
    grown = (perplexity[1:] - perplexity[0]).astype(np.float32)
    return Fitted({"perplexity": grown}, "PrunedChannels", model.signature)


def without_channels(word: PrunedChannels, params: Params, config: Config, layer: int) -> Params:
    """Zero the model's parameters for the channels of keys and values that `layer` does not keep."""
    layers = list(regroup(params, plan(config, stacked=False))["layers"])
    p, made = layers[layer], word.config(config)
    keys, values = word.stays(p, made, layer)
    width, changed = config.head_dim, {}
    for name, stays in (("k", keys), ("v", values)):
        mask = np.zeros((len(stays), width), bool)
        np.put_along_axis(mask, stays, True, axis=1)
        changed[name] = jnp.where(jnp.asarray(mask.reshape(1, 1, -1)), p[name], 0)
    layers[layer] = {**p, **changed}
    return regroup({**params, "layers": tuple(layers)}, plan(config))


@partial(jax.jit, static_argnames="config")
def _loss(
    config: Config, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> Float[Array, ""]:
    """Compute the sum of the negative log-likelihoods of all tokens after the first."""
    logits = forward(params, tokens, config)[:, :-1].astype(jnp.float32)
    said = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)[..., 0]
    counts = jnp.arange(1, tokens.shape[1])[None] < lengths[:, None]
    return -jnp.where(counts, said, 0.0).sum()
