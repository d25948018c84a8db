"""Fits KV-Distill's scorer and weights by distillation from the full cache (arXiv:2503.10337)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax import steps
from kvjax.base.errors import InputError
from kvjax.compress.segments import whole_slots
from kvjax.compress.select import ComputedTokens
from kvjax.eval.tasks.sample import Sample
from kvjax.fitting.loops.descent import Arrays, descended, uniform
from kvjax.fitting.loops.whole import check_whole
from kvjax.fitting.prompts.questions import (
    AnswerBatch,
    adapter,
    answer_logprobs,
    asked,
    divergence,
    mean_said,
)
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import View
from kvjax.keep.observations.observe import Hidden
from kvjax.keep.prompts.distilled import judged
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.state.cache import Cache, GroupState
from kvjax.steps import Run
from kvjax.steps.prefilling.lora import Marks

# The name under which the arrays of a running fit are stored beside the parameters.
_NAME = "learned now"


class DistillationLoss(NamedTuple):
    """How scores select tokens during the fit, and the loss.

    least, most: the range from which the share of kept tokens of a context is drawn. tau: the temperature of
    the decisions. forward: the weight of KL(p || q); KL(q || p) gets the rest.
    """

    least: float
    most: float
    tau: float
    forward: float


class DistilledBatch(NamedTuple):
    """Questions, and the inputs of the layer whose scores select."""

    asked: AnswerBatch
    hidden: Float[Array, "B T D"]


def fit_distilled(
    model: Model,
    batches: list[list[Sample]],
    *,
    method: Method,
    rank: int = 16,
    hidden: int = 32,
    least: float = 0.1,
    most: float = 0.5,
    tau: float = 0.3,
    forward: float = 0.5,
    rate: float = 3e-3,
    epochs: int = 16,
    seed: int = 0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit a scorer of `hidden` channels and a LoRA of rank `rank` by distillation from the full cache.

    The share of a context that is kept is drawn from `least` to `most`. A token's decision a is
    sigmoid((score - the lowest score that is kept + noise) / tau), where noise is the difference of two draws
    of a Gumbel distribution: the token gets the LoRA to the extent a, and log a is added to its logits. The
    loss is forward KL(p || q) + (1 - forward) KL(q || p) at the tokens that predict the answers, with p from
    all slots and q from the kept ones. Adam (arXiv:1412.6980) takes one step per batch at learning rate
    `rate`, in `epochs` passes over the batches. Deviation: the paper learns from instructions of all kinds;
    how it passes a gradient to the scorer is not known to us. Raises InputError for a model whose layers are
    not all plain attention that keeps all tokens.
    """
    check_whole(model, "scorers")
    if not 0 < least <= most <= 1:
        raise InputError(f"least and most are shares, 0 < least <= most <= 1, got {least!r} and {most!r}")
    c, keys = model.config, jax.random.split(jax.random.key(seed + 1))
    start = adapter(model, rank, seed) | {
        "in": uniform(keys[0], (1, c.d_model, hidden), c.d_model),
        "in_bias": jnp.zeros((1, hidden)),
        "out": uniform(keys[1], (1, hidden, 1), hidden),
        "out_bias": jnp.zeros((1, 1)),
    }
    layer, aim = method.reread.after(c.layers), DistillationLoss(least, most, tau, forward)

    def loss(arrays: Arrays, batch: DistilledBatch, params: Params) -> Float[Array, ""]:
        return distilled(c, params, arrays, batch, aim)

    found = descended(
        loss,
        start,
        _read(model, asked(model, batches, epochs, seed, progress), layer),
        model.params,
        rate=rate,
    )
    return Fitted(found, "TokenScorer", model.signature)


def _read(model: Model, batches: Iterable[AnswerBatch], layer: int) -> Iterator[DistilledBatch]:
    for batch in batches:
        yield DistilledBatch(batch, hidden_at(model.config, layer, model.params, batch))


@partial(jax.jit, static_argnums=(0, 1))
def hidden_at(config: Config, layer: int, params: Params, batch: AnswerBatch) -> Float[Array, "B T D"]:
    """Compute the inputs of a layer on contexts."""
    run, needs = Run(config, Method()), frozenset({Hidden()})
    prompt = steps.read_tokens(run, params, batch.context, batch.lengths, None, needs)
    found: Any = [x for fresh in prompt.fresh for x in fresh.observed[key_of(Hidden())]]  # type: ignore[union-attr]
    return found[layer]


def distilled(
    config: Config, params: Params, arrays: Arrays, batch: DistilledBatch, aim: DistillationLoss
) -> Float[Array, ""]:
    """Compute the loss of scorer and weights on a batch."""
    given = batch.asked
    odds, last = decided(judged({n: x[0] for n, x in arrays.items()}, batch.hidden), given, aim)
    run, params = Run(config, Method()), params | {"fitted": {_NAME: arrays}}
    marks = Marks(jnp.where(last, 0.0, jax.nn.sigmoid(odds)), _NAME)
    read = steps.read_tokens(
        run, params, given.context, given.lengths, None, frozenset({Hidden()}), marks=marks
    )
    amount, groups = jnp.where(last, 0.0, jax.nn.log_sigmoid(odds)), []
    for gm, fresh in zip(run.groups(params), read.fresh, strict=True):
        assert isinstance(fresh, ComputedTokens) and fresh.k is not None and fresh.v is not None
        k, v = fresh.k, fresh.v
        pos, bias = (jnp.broadcast_to(x[None, :, None], k.shape[:4]) for x in (read.positions.pos, amount))
        groups.append(GroupState(tail=whole_slots(gm, View(k, v, pos, bias, {}))))
    q, p = answer_logprobs(config, params, Cache(tuple(groups), given.lengths), given), given.told
    return mean_said(divergence(p, q, aim.forward) / 2, given)


def decided(
    score: Float[Array, "B T"], given: AnswerBatch, aim: DistillationLoss
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Relax the log-odds that tokens stay; return these, and which token stays in any case."""
    share, noise = jax.random.split(jax.random.key(given.seed))
    at, last = jnp.arange(score.shape[1])[None], given.lengths[:, None] - 1
    part = jax.random.uniform(share, minval=aim.least, maxval=aim.most)
    # Scores are normalised, so that raising or scaling all of them gains nothing.
    many = given.lengths[:, None].astype(jnp.float32)
    n = jnp.ceil(part * many).astype(jnp.int32)
    score = jnp.where(at <= last, score, 0.0)
    apart = jnp.where(at <= last, score - score.sum(1, keepdims=True) / many, 0.0)
    score = apart * jax.lax.rsqrt(jnp.square(apart).sum(1, keepdims=True) / many + 1e-6)
    order = -jnp.sort(-jnp.where(at <= last, score, -jnp.inf), axis=1)
    bar = jax.lax.stop_gradient(jnp.take_along_axis(order, jnp.minimum(n, last), axis=1))
    return (score - bar + jax.random.logistic(noise, score.shape)) / aim.tau, at == last
