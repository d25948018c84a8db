"""Fits memory tokens by repeating runs of a text from their memory alone (LoMA)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import steps
from kvjax.compress.segments import whole_slots
from kvjax.compress.select import ComputedTokens
from kvjax.eval.tasks.sample import Sample
from kvjax.fitting.loops.descent import Arrays, descended
from kvjax.fitting.loops.whole import check_whole
from kvjax.fitting.prompts.memory_tokens import embeddings, run_of, surprise
from kvjax.fitting.prompts.questions import AnswerBatch, adapter, asked, read_by
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.kinds import View
from kvjax.keep.prompts.memory_tokens import RunMemory
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.state.cache import Cache, GroupState
from kvjax.steps import PrefillOutputs, Run


class ContextRuns(NamedTuple):
    """The runs of contexts: the tokens of each, and how many tokens of the context are before it."""

    tokens: Int[Array, "B U"]
    before: Int[Array, "U"]


def fit_repetition(
    model: Model,
    batches: list[list[Sample]],
    *,
    method: Method,
    answers: float = 0.1,
    rank: int = 16,
    rate: float = 3e-3,
    epochs: int = 16,
    seed: int = 0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit embeddings of memory tokens and a LoRA of rank `rank` that repeat runs (arXiv:2401.09486).

    Contexts are read as the method reads them. The loss is -log p of the tokens of every run, predicted from
    its memory alone (`repeated`), plus `answers` times -log p of the answers given all of the memory. Adam
    (arXiv:1412.6980) takes one step per batch at learning rate `rate`, in `epochs` passes over the batches.
    Deviations: the model is not trained, while the paper trains all of it (`kvjax.train.compressed`), so its
    own weights must be able to use the memory; and of the text after the memory only answers count, while the
    paper's first loss is that of all tokens, with a weight of 1: with that loss, runs are learned later.
    Raises InputError for a model whose layers are not all plain attention that keeps all tokens.
    """
    check_whole(model, "memory tokens")
    start = adapter(model, rank, seed) | embeddings(model, method.reread, seed)
    first = Fitted({n: np.asarray(x) for n, x in start.items()}, "RunMemory", model.signature)
    run = run_of(model, method, first)

    def loss(arrays: Arrays, batch: AnswerBatch, params: Params) -> Float[Array, ""]:
        said, runs = losses(run, params | {"fitted": {first.digest: arrays}}, batch)
        return runs + answers * said

    read = asked(model, batches, epochs, seed, progress)
    found = descended(loss, start, read, model.params, rate=rate)
    return Fitted(found, "RunMemory", model.signature)


def losses(run: Run, params: Params, batch: AnswerBatch) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Compute mean -log p of answers' tokens given contexts' memory, and runs' tokens given theirs alone."""
    prompt = read_by(run, params, batch)
    said = surprise(run, params, prompt, batch)
    return said, repeated(run, params, prompt, batch.context, batch.lengths)


def repeated(
    run: Run, params: Params, prompt: PrefillOutputs, context: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> Float[Array, ""]:
    """Compute the mean of -log p of the tokens of every run, predicted in order from its memory alone.

    After the memory, the model reads as many tokens with the embedding "repeat" as the run has. The i-th sees
    the memory and those before it, has the position of the run's i-th token plus the length of the run, and
    predicts that token.
    """
    word: RunMemory = run.method.reread
    assert word.fitted is not None
    (rows, t), text = context.shape, jnp.maximum(lengths - 1, 0)
    size, many = word.chunk(t), word.chunks(t)
    before = size * jnp.arange(many, dtype=jnp.int32)
    runs = ContextRuns(jnp.clip(text[:, None] - before[None], 0, size), before)
    cue = params["fitted"][word.fitted.digest]["repeat"].astype(params["embed"].dtype)
    cues, counts = jnp.broadcast_to(cue, (rows * many, size, cue.shape[-1])), runs.tokens.reshape(-1)
    plain, over = Run(run.config, Method()), _apart(run, params, prompt, runs)
    read = steps.read_tokens(plain, params, cues, counts, over, frozenset(), as_steps=True)
    ids = jnp.pad(context, ((0, 0), (0, max(0, many * size - t))))[:, : many * size].reshape(-1, size)
    said = jax.nn.log_softmax(read.logits.astype(jnp.float32))
    off = -jnp.take_along_axis(said, ids[..., None], axis=-1)[..., 0]
    own = jnp.arange(size)[None] < counts[:, None]
    return jnp.where(own, off, 0.0).sum() / jnp.maximum(own.sum(), 1).astype(jnp.float32)


def _apart(run: Run, params: Params, prompt: PrefillOutputs, runs: ContextRuns) -> Cache:
    """Put every run's memory into a cache row of its own, without the tokens before it."""
    word: RunMemory = run.method.reread
    (rows, many), size = runs.tokens.shape, word.tokens
    each = jnp.arange(many, dtype=jnp.int32)
    stands = jax.vmap(word.stands, in_axes=(0, 1), out_axes=1)(each, runs.tokens)
    there = jnp.arange(size)[None, None] < word.of(runs.tokens)[..., None]
    stands = jnp.where(there, stands, -1).reshape(rows * many, 1, size)

    def split(x: Float[Array, "Lg B K S X"] | None) -> Float[Array, "Lg R K M X"]:
        assert x is not None
        x = x[:, :, :, : many * size].reshape(*x.shape[:3], many, size, x.shape[-1])
        return jnp.moveaxis(x, 3, 2).reshape(x.shape[0], rows * many, x.shape[2], size, -1)

    groups = []
    for gm, fresh in zip(run.groups(params), prompt.fresh, strict=True):
        assert isinstance(fresh, ComputedTokens)
        k, v = split(fresh.k), split(fresh.v)
        pos = jnp.broadcast_to(stands, k.shape[:4])
        groups.append(GroupState(tail=whole_slots(gm, View(k, v, pos, None, {}))))
    return Cache(tuple(groups), (runs.before[None] + runs.tokens).reshape(-1))
