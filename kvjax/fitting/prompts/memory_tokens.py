"""Memory tokens, taught by the answers that are given behind what they leave of contexts (CCM, Gisting)."""

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
from kvjax.fitting.prompts.imitation import taught
from kvjax.fitting.prompts.questions import AnswerBatch, adapter, asked, left_of, mean_said, said_behind
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.keep.prompts.memory_tokens import MemoryTokens, RunMemory
from kvjax.keep.prompts.restore import RestoreTokens
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.state.cache import Cache
from kvjax.steps import Prompt, Run


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
    """Embeddings of memory tokens and a LoRA of rank `rank` (arXiv:2312.03414, section 3.2; 2304.08467).

    Contexts are read as the method reads them. What becomes small is -log p of the answers behind what it
    leaves; by Adam (arXiv:1412.6980) at learning rate `rate`, which grows over 50 steps, on gradients of a
    norm of at most 1, one step per batch, in `epochs` readings. What is learned is of the method's number of
    memory tokens, length of chunks and way to hold several. Deviations: the first `imitate` steps, but half
    of all at most, teach memory to leave slots like those of tokens (`kvjax.fitting.prompts.imitation`),
    which has a weight of `alike` afterwards; and the model stays as it is, as in CCM; the authors of Gisting
    train all of it (`kvjax.train.compressed`). Raises InputError for a model whose layers are not all plain
    attention that keeps all tokens.
    """
    check_whole(model, "memory tokens")
    start = adapter(model, rank, seed) | embeddings(model, method.reread, seed)
    first = Fitted({n: np.asarray(x) for n, x in start.items()}, "MemoryTokens", model.signature)
    run = run_of(model, method, first)

    first_steps = min(imitate, epochs * len(batches) // 2)
    read = asked(model, batches, epochs, seed, progress)
    found = taught(
        model, run, start, read, partial(surprise, run), rate=rate, imitate=first_steps, alike=alike
    )
    return Fitted(found, "MemoryTokens", model.signature)


def embeddings(model: Model, word: MemoryTokens | RestoreTokens, seed: int) -> Arrays:
    """Embeddings as they begin, as long as tokens': of learned tokens, and by what runs are said again."""
    length, d = jnp.std(model.params["embed"].astype(jnp.float32)), model.config.d_model
    found = {"memory": jax.random.normal(jax.random.key(seed + 1), (1, word.tokens, d)) * length}
    if isinstance(word, RunMemory):
        found["repeat"] = jax.random.normal(jax.random.key(seed + 2), (1, d)) * length
    return found


def run_of(model: Model, method: Method, fitted: Fitted) -> Run:
    """What is static in reading as a method with these arrays does."""
    word = dataclasses.replace(method.reread, fitted=fitted)
    return Run(model.config, dataclasses.replace(method, reread=word))


def surprise(run: Run, params: Params, prompt: Prompt, batch: AnswerBatch) -> Float[Array, ""]:
    """The mean of -log p of answers' tokens behind what a method leaves of contexts that it has read."""
    return surprise_over(run, params, left_of(run, params, prompt, batch), batch)


def surprise_over(run: Run, params: Params, cache: Cache, batch: AnswerBatch) -> Float[Array, ""]:
    """The mean of -log p of answers' tokens over what a cache holds of contexts."""
    said = said_behind(run.config, params, cache, batch)
    return mean_said(-jnp.take_along_axis(said, batch.answer[..., None], axis=-1)[..., 0], batch)
