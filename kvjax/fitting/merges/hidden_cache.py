"""Fits compressed states and attention to them, on answers that need evicted tokens (Neurocache)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.eval.tasks.sample import Sample
from kvjax.fitting.loops.answers import Answers, answers
from kvjax.fitting.loops.descent import Arrays, descended
from kvjax.fitting.loops.whole import check_whole
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.make.hidden_cache import HiddenStateCache
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.models.transformer import forward


def fit_states(
    model: Model,
    batches: list[list[Sample]],
    *,
    method: Method,
    rank: int = 8,
    rate: float = 1e-3,
    epochs: int = 8,
    seed: int = 0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the projection of states, cache attention and a LoRA of rank `rank` (arXiv:2407.02486, section 3).

    The loss is -log p of the answers, in texts that the model reads from the beginning with windows and
    states. Adam (arXiv:1412.6980) takes one step per batch at learning rate `rate`, in `epochs` passes over
    the batches. No gradient flows through the cache except through the projection. The arrays fit only the
    method's window and hyper-parameters. Deviation: the paper learns from all tokens of texts. Raises
    InputError for a model whose layers are not all plain attention that keeps all tokens.
    """
    check_whole(model, "compressed states")
    word = dataclasses.replace(method.make, fitted=None)

    def loss(arrays: Arrays, batch: AnswerTokens, params: Params) -> Float[Array, ""]:
        return surprise(word, model.config, params, arrays, batch)

    read = (said_in(model, one) for one in progress([one for _ in range(epochs) for one in batches]))
    start = word.start(model.params, model.config, rank, seed)
    found = descended(loss, start, read, model.params, rate=rate)
    return Fitted(found, "HiddenStateCache", model.signature)


class AnswerTokens(NamedTuple):
    """Contexts, questions and answers as rows of tokens, and the answer token to predict at each position."""

    texts: Answers
    answer: Int[Array, "B T"]


def said_in(model: Model, samples: list[Sample]) -> AnswerTokens:
    """Write a batch of samples as texts."""
    texts = answers(model, samples)
    answer = np.zeros(texts.tokens.shape, np.int32)
    answer[np.asarray(texts.said)] = [token for one in samples for token in one.answer]
    return AnswerTokens(texts, jnp.asarray(answer))


def surprise(
    word: HiddenStateCache, config: Config, params: Params, arrays: Arrays, batch: AnswerTokens
) -> Float[Array, ""]:
    """Compute the mean of -log p of answers' tokens, by the model that these arrays make."""
    tokens, lengths, said = batch.texts
    logits = forward(word.with_arrays(arrays, params, config), tokens, word.config(config), lengths)
    p = jax.nn.log_softmax(logits.astype(jnp.float32))
    each = -jnp.take_along_axis(p, batch.answer[..., None], axis=-1)[..., 0]
    return jnp.where(said, each, 0.0).sum() / jnp.maximum(said.sum(), 1).astype(jnp.float32)
