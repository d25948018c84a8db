"""Fits memory tokens on answers that attend to them in place of contexts (CCM, Gisting)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.eval.tasks.sample import Sample
from kvjax.fitting.loops.descent import Arrays
from kvjax.fitting.loops.whole import check_whole
from kvjax.fitting.prompts.imitation import fitted_memory
from kvjax.fitting.prompts.questions import AnswerBatch, adapter, answer_logprobs, asked, left_of, mean_said
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.keep.prompts.memory_tokens import MemoryTokens, RunMemory
from kvjax.keep.prompts.restore import RestoreTokens
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.state.cache import Cache
from kvjax.steps import PrefillOutputs, Run


def fit_memory(
    model: Model,
    batches: list[list[Sample]],
    *,
    method: Method,
    rank: int = 16,
    rate: float = 3e-3,
    epochs: int = 16,
    imitate: int = 150,
    alike: float = 2.0,
    seed: int = 0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit embeddings of memory tokens and a LoRA of rank `rank` (arXiv:2312.03414, section 3.2; 2304.08467).

    Contexts are read as the method reads them. The loss is -log p of the answers, given the compressed
    contexts. Adam (arXiv:1412.6980) takes one step per batch, with a learning rate that grows to `rate` over
    50 steps and gradients clipped to a norm of 1, in `epochs` passes over the batches. The arrays fit only
    the method's number of memory tokens, length of chunks and way to combine several chunks. Deviations: in
    the first `imitate` steps, but at most half of all, memory is fitted to resemble slots of tokens
    (`kvjax.fitting.prompts.imitation`), a loss that has the weight `alike` afterwards; and the model is not
    trained, as in CCM; the authors of Gisting train all of it (`kvjax.train.compressed`). Raises InputError
    for a model whose layers are not all plain attention that keeps all tokens.
    """
    check_whole(model, "memory tokens")
    start = adapter(model, rank, seed) | embeddings(model, method.reread, seed)
    first = Fitted({n: np.asarray(x) for n, x in start.items()}, "MemoryTokens", model.signature)
    run = run_of(model, method, first)

    first_steps = min(imitate, epochs * len(batches) // 2)
    read = asked(model, batches, epochs, seed, progress)
    found = fitted_memory(
        model, run, start, read, partial(surprise, run), rate=rate, imitate=first_steps, alike=alike
    )
    return Fitted(found, "MemoryTokens", model.signature)


def embeddings(model: Model, word: MemoryTokens | RestoreTokens, seed: int) -> Arrays:
    """Draw initial embeddings, as long as tokens': of learned tokens, and of the one that repeats runs."""
    length, d = jnp.std(model.params["embed"].astype(jnp.float32)), model.config.d_model
    found = {"memory": jax.random.normal(jax.random.key(seed + 1), (1, word.tokens, d)) * length}
    if isinstance(word, RunMemory):
        found["repeat"] = jax.random.normal(jax.random.key(seed + 2), (1, d)) * length
    return found


def run_of(model: Model, method: Method, fitted: Fitted) -> Run:
    """Return the static settings for reading a prompt by a method with these arrays."""
    word = dataclasses.replace(method.reread, fitted=fitted)
    return Run(model.config, dataclasses.replace(method, reread=word))


def surprise(run: Run, params: Params, prompt: PrefillOutputs, batch: AnswerBatch) -> Float[Array, ""]:
    """Compute the mean of -log p of answers' tokens, given contexts that a method has read and compressed."""
    return surprise_over(run, params, left_of(run, params, prompt, batch), batch)


def surprise_over(run: Run, params: Params, cache: Cache, batch: AnswerBatch) -> Float[Array, ""]:
    """Compute the mean of -log p of answers' tokens, given a cache of the contexts."""
    said = answer_logprobs(run.config, params, cache, batch)
    return mean_said(-jnp.take_along_axis(said, batch.answer[..., None], axis=-1)[..., 0], batch)
