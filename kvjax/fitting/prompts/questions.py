"""Questions after contexts that a method has compressed, and the predictions of the answers there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import steps
from kvjax.api.chunks import bucket
from kvjax.eval.tasks.sample import Sample
from kvjax.fitting.loops.descent import uniform
from kvjax.grammar import Method
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.state.cache import Cache
from kvjax.steps import Run


class AnswerBatch(NamedTuple):
    """Contexts, the questions and answers after them, and the positions and tokens of the answers.

    told: the log-probabilities that the model predicts with all slots. seed: of random draws.
    """

    context: Int[Array, "B T"]
    lengths: Int[Array, "B"]
    tail: Int[Array, "B Q"]
    tails: Int[Array, "B"]
    said: Bool[Array, "B Q"]
    answer: Int[Array, "B Q"]
    told: Float[Array, "B Q V"]
    seed: Int[Array, ""]


def asked(
    model: Model, batches: list[list[Sample]], epochs: int, seed: int,
    progress: Callable[[Iterable[Any]], Iterable[Any]],
) -> Iterator[AnswerBatch]:  # fmt: skip
    """Batches of samples, `epochs` times; the model itself answers once."""
    draw, every = np.random.default_rng(seed), [one for samples in batches for one in samples]
    sizes = [bucket(max(len(x) for x in part)) for part in ([s.context for s in every], map(_tail, every))]
    found: list[AnswerBatch] = []
    for i in progress(range(epochs * len(batches))):
        if len(found) < len(batches):
            found.append(_asked(model, batches[len(found)], sizes))
        yield found[i % len(batches)]._replace(seed=jnp.int32(draw.integers(2**31 - 1)))


def _tail(sample: Sample) -> list[int]:
    """Join the tokens after a context; the last token of an answer is predicted but is not an input."""
    return [*sample.question, *sample.answer[:-1]]


def _asked(model: Model, samples: list[Sample], sizes: list[int]) -> AnswerBatch:
    context, tail = (
        np.array([[*row, *[0] * (size - len(row))] for row in rows], np.int32)
        for rows, size in zip(([s.context for s in samples], map(_tail, samples)), sizes, strict=True)
    )
    lengths, tails = (np.array([len(x) for x in part], np.int32) for part in (
        [s.context for s in samples], [_tail(s) for s in samples]
    ))  # fmt: skip
    answer, said = np.zeros_like(tail), np.zeros(tail.shape, bool)
    for row, sample in enumerate(samples):
        at = np.arange(max(tails[row] - len(sample.answer), 0), tails[row])
        answer[row, at], said[row, at] = sample.answer[-len(at) :], True
    nothing = jnp.zeros(())
    each = (jnp.asarray(x) for x in (context, lengths, tail, tails, said, answer))
    given = AnswerBatch(*each, told=nothing, seed=nothing)  # pyright: ignore[reportCallIssue]
    return given._replace(told=_told(model.config, model.params, given))


@partial(jax.jit, static_argnums=0)
def _told(config: Config, params: Params, batch: AnswerBatch) -> Float[Array, "B Q V"]:
    return answer_logprobs(config, params, left_by(Run(config, Method()), params, batch), batch)


def left_by(run: Run, params: Params, batch: AnswerBatch) -> Cache:
    """Return the cache of the contexts under a method, with free slots for the questions and answers."""
    return left_of(run, params, read_by(run, params, batch), batch)


def read_by(run: Run, params: Params, batch: AnswerBatch) -> steps.PrefillOutputs:
    """Read the contexts as a method does."""
    needs = steps.needs_of(run, params)
    return steps.observe(run, params, batch.context, batch.lengths, None, needs)


def left_of(run: Run, params: Params, prompt: steps.PrefillOutputs, batch: AnswerBatch) -> Cache:
    """Return the cache that a method keeps of contexts that it has read."""
    sizes: dict[str, Any] = dict(tokens=batch.context.shape[1], room=batch.tail.shape[1])
    return steps.settle(run, params, prompt, None, compress=True, **sizes)


def answer_logprobs(
    config: Config, params: Params, cache: Cache, batch: AnswerBatch
) -> Float[Array, "B Q V"]:
    """Log-probabilities of the next token at every token of questions and answers, given the cache."""
    run = Run(config, Method())
    read = steps.read_tokens(run, params, batch.tail, batch.tails, cache, frozenset(), as_steps=True)
    return jax.nn.log_softmax(read.logits.astype(jnp.float32))


def mean_said(x: Float[Array, "B Q"], batch: AnswerBatch) -> Float[Array, ""]:
    """Compute the mean over the tokens at which answers are predicted."""
    return jnp.where(batch.said, x, 0.0).sum() / jnp.maximum(batch.said.sum(), 1).astype(jnp.float32)


def divergence(p: Float[Array, "*b V"], q: Float[Array, "*b V"], forward: float = 0.5) -> Float[Array, "*b"]:
    """2 (forward KL(p || q) + (1 - forward) KL(q || p)) of log-probabilities."""
    back = (jnp.exp(q) * (q - p)).sum(-1)
    return 2 * (forward * (jnp.exp(p) * (p - q)).sum(-1) + (1 - forward) * back)


def adapter(model: Model, rank: int, seed: int) -> dict[str, Array]:
    """Draw initial extra weights of marked tokens, of this rank and without effect (arXiv:2106.09685)."""
    c, keys = model.config, jax.random.split(jax.random.key(seed), 4)
    q, k = c.heads * c.head_dim, c.kv_heads * c.head_dim
    widths = {"q": (c.d_model, q), "k": (c.d_model, k), "v": (c.d_model, k), "o": (q, q)}
    start: dict[str, Array] = {}
    for key, (name, (width, out)) in zip(keys, widths.items(), strict=True):
        start[f"{name}_down"] = uniform(key, (c.layers, width, rank), width)
        start[f"{name}_up"] = jnp.zeros((c.layers, rank, out))
    return start
