"""Fits restore tokens by distillation from the full cache (RestoreKV, arXiv:2608.01247)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from kvjax.base.errors import InputError
from kvjax.eval.tasks.sample import Sample
from kvjax.fitting.loops.descent import Arrays, descended
from kvjax.fitting.loops.whole import check_whole
from kvjax.fitting.prompts.memory_tokens import embeddings
from kvjax.fitting.prompts.questions import (
    AnswerBatch,
    adapter,
    answer_logprobs,
    asked,
    divergence,
    left_by,
    mean_said,
)
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.pure import bind
from kvjax.steps import Run


def fit_restored(
    model: Model,
    batches: list[list[Sample]],
    *,
    method: Method,
    rank: int = 16,
    rate: float = 3e-3,
    epochs: int = 8,
    seed: int = 0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit embeddings of restore tokens and a LoRA of rank `rank` by distillation from the full cache.

    Contexts are compressed by the method at its budget, such as 0.125. The loss is KL(p || q) + KL(q || p) at
    the tokens that predict the answers, with p from all slots and q from the kept ones. Adam
    (arXiv:1412.6980) takes one step per batch at learning rate `rate`, in `epochs` passes over the batches.
    Deviations: the authors draw a budget from 0.025 to 0.25 for every step, and use answers that the model
    generates itself. Raises InputError for the budget 1.0, and for a model whose layers are not all plain
    attention that keeps all tokens.
    """
    check_whole(model, "restore tokens")
    assert method.keep is not None and method.keep.restore is not None
    if method.keep.budget.ratio == 1:
        raise InputError(
            "restore tokens take up what leaves a cache, and nothing leaves one of the budget 1.0: give the "
            "budget that they are for, such as budget=0.125"
        )
    start = adapter(model, rank, seed) | embeddings(model, method.keep.restore, seed)
    first = Fitted({n: np.asarray(x) for n, x in start.items()}, "RestoreTokens", model.signature)
    run = run_of(model, method, first)

    def loss(arrays: Arrays, batch: AnswerBatch, params: Params) -> Float[Array, ""]:
        return restored(run, params | {"fitted": {first.digest: arrays}}, batch)

    read = asked(model, batches, epochs, seed, progress)
    found = descended(loss, start, read, model.params, rate=rate)
    return Fitted(found, "RestoreTokens", model.signature)


def run_of(model: Model, method: Method, fitted: Fitted) -> Run:
    """Return the static settings for compressing by a method with these arrays."""
    assert method.keep is not None
    word = dataclasses.replace(method.keep.restore, fitted=fitted)
    full = dataclasses.replace(method, keep=dataclasses.replace(method.keep, restore=word))
    return Run(model.config, bind(full, model))


def restored(run: Run, params: Params, batch: AnswerBatch) -> Float[Array, ""]:
    """KL in both directions between the predictions with all slots and with a method's cache."""
    said = answer_logprobs(run.config, params, left_by(run, params, batch), batch)
    return mean_said(divergence(batch.told, said), batch)
