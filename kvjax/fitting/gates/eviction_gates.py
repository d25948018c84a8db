"""Fits gates that decide which tokens to evict, by distillation from the full cache (DMS, Attention-Gate)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.eval.tasks.sample import Sample
from kvjax.fitting.loops.cuts import CutTexts, KeptBeforeCut, cut_after_contexts, divergence, mean_before
from kvjax.fitting.loops.descent import Arrays, descended, uniform
from kvjax.fitting.loops.whole import check_whole
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.kinds import Inputs
from kvjax.keep.gates.eviction_gates import attention_gate
from kvjax.keep.gates.gate import gated
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer
from kvjax.models.model import Model
from kvjax.ops.attention.union import Keys

Progress = Callable[[Iterable[Any]], Iterable[Any]]
# (a layer's arrays, its inputs, which tokens are before the cut) -> the log-odds that each token is evicted.
Odds = Callable[[Arrays, Inputs, Bool[Array, "B T"]], Float[Array, "B K T"]]


class EvictionLoss(NamedTuple):
    """The eviction loss: the target share of evicted tokens, its weight `penalty`, the temperature `tau`."""

    target: float
    penalty: float
    tau: float


def fit_eviction_gate(
    model: Model,
    batches: list[list[Sample]],
    *,
    target: float = 0.5,
    recent: int = 256,
    penalty: float = 10.0,
    tau: float = 0.1,
    rate: float = 1e-2,
    epochs: int = 16,
    seed: int = 0,
    progress: Progress = iter,
) -> Fitted:
    """Fit DMS's decisions (arXiv:2506.05345, section 3) by distillation from the model with all slots.

    The decisions a about the tokens of contexts are relaxed to sigmoid((logit + noise) / tau), where noise is
    the difference of two draws of a Gumbel distribution, and log(1 - a) is added to the logits of tokens that
    are `recent` or more tokens before the question. The loss is the divergence from the model with the full
    cache at the tokens that predict the answers, plus `penalty` max(0, target - mean a). Adam
    (arXiv:1412.6980) takes one step per batch at learning rate `rate`, in `epochs` passes over the batches.
    Deviations: the model is not trained; `target` is constant instead of growing over the steps; and the
    authors learn from all tokens of texts. Raises InputError for a model whose layers are not all plain
    attention that keeps all tokens.
    """
    check_whole(model, "gates")
    c, aim = model.config, EvictionLoss(target, penalty, tau)
    start = {
        "out": uniform(jax.random.key(seed), (c.layers, c.d_model, c.kv_heads), c.d_model),
        "out_bias": jnp.zeros((c.layers, c.kv_heads)),
    }

    def loss(arrays: Arrays, batch: CutTexts, params: Params) -> Float[Array, ""]:
        return evicted(c, params, arrays, batch, linear_odds, aim, recent)

    read = cut_after_contexts(model, batches, epochs, seed, progress)
    return Fitted(descended(loss, start, read, model.params, rate=rate), "EvictionGate", model.signature)


def fit_attention_gate(
    model: Model,
    batches: list[list[Sample]],
    *,
    target: float = 0.5,
    heads: int = 2,
    rank: int = 16,
    penalty: float = 10.0,
    tau: float = 0.3,
    rate: float = 1e-2,
    epochs: int = 16,
    seed: int = 0,
    progress: Progress = iter,
) -> Fitted:
    """Fit Attention-Gate's gates (arXiv:2410.12876), with `heads` heads of `rank` channels in every layer.

    The gates read contexts. The loss is the divergence from the model with the full cache at the tokens that
    predict the answers, plus the eviction loss `penalty` max(0, target - mean share of evicted tokens). Adam
    (arXiv:1412.6980) takes one step per batch at learning rate `rate`, in `epochs` passes over the batches.
    Deviations: flags are relaxed like DMS's decisions (`fit_eviction_gate`), while the authors use hard flags
    and
    a straight-through gradient; and theirs maximise the likelihood of texts or answers, together with the
    model.
    Raises InputError for a model whose layers are not all plain attention that keeps all tokens.
    """
    check_whole(model, "gates")
    c, keys, aim = model.config, jax.random.split(jax.random.key(seed), 4), EvictionLoss(target, penalty, tau)
    shape = (c.layers, c.d_model, heads, rank)
    start = {name: uniform(key, shape, c.d_model) for name, key in zip("qkv", keys, strict=False)}
    start |= {
        "out": uniform(keys[3], (c.layers, heads, rank, c.kv_heads), heads * rank),
        "out_bias": jnp.zeros((c.layers, c.kv_heads)),
    }

    def loss(arrays: Arrays, batch: CutTexts, params: Params) -> Float[Array, ""]:
        return evicted(c, params, arrays, batch, attention_odds, aim)

    read = cut_after_contexts(model, batches, epochs, seed, progress)
    return Fitted(descended(loss, start, read, model.params, rate=rate), "AttentionGate", model.signature)


def linear_odds(arrays: Arrays, inputs: Inputs, before: Bool[Array, "B T"]) -> Float[Array, "B K T"]:
    """DMS's: a linear map of the layer's input."""
    return jnp.moveaxis(gated(arrays, inputs.hidden.astype(jnp.float32)), 2, 1)


def attention_odds(arrays: Arrays, inputs: Inputs, before: Bool[Array, "B T"]) -> Float[Array, "B K T"]:
    """Compute Attention-Gate's log-odds of eviction; its gates give the log-odds that a token is kept."""
    return -attention_gate(arrays, inputs.hidden.astype(jnp.float32), before)


def evicted(
    config: Config,
    params: Params,
    arrays: Arrays,
    batch: CutTexts,
    odds: Odds,
    aim: EvictionLoss,
    recent: int = 0,
) -> Float[Array, ""]:
    """Compute the loss of decisions on a batch; the `recent` newest tokens before a cut stay in any case."""

    def leaving(layer: Layer, inputs: Inputs, keys: Keys, s: Array, before: Array) -> KeptBeforeCut:
        logit = relaxed(odds(of_layer(arrays, layer), inputs, before), batch.seed, layer.number, aim.tau)
        old = before & (inputs.pos < batch.cuts[:, None] - recent)
        assert inputs.v is not None
        amount = jnp.where(old[:, None], jax.nn.log_sigmoid(-logit), 0.0)
        return KeptBeforeCut(keys.k, inputs.v, amount, mean_before(jax.nn.sigmoid(logit), before))

    off, found = divergence(config, params, batch, leaving, "gates")
    return off + aim.penalty * jnp.maximum(aim.target - mean_of(found), 0.0)


def of_layer(arrays: Arrays, layer: Layer) -> Arrays:
    """Return a layer's arrays."""
    return {name: x[layer.number] for name, x in arrays.items()}


def relaxed(
    logit: Float[Array, "B K T"], seed: Array, number: int | Array, tau: float
) -> Float[Array, "B K T"]:
    """Relax the log-odds of decisions by noise: (logit + g1 - g2) / tau, of Gumbel draws."""
    key = jax.random.fold_in(jax.random.key(seed), number)
    # The difference of two Gumbel draws is one of a logistic distribution.
    return (logit + jax.random.logistic(key, logit.shape)) / tau


def mean_of(found: tuple[Any, ...]) -> Float[Array, ""]:
    """Average over all layers the values collected in each."""
    return jnp.concatenate([jnp.atleast_1d(x) for x in found]).mean()
