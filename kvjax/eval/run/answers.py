"""Answering questions: the model generates, in one program, or the right answer is fed in one pass."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import steps
from kvjax.api.prefill import PaddedTokens
from kvjax.api.verify import passes, takes_fewer_passes
from kvjax.eval.tasks.rows import QuestionRows, targets_of
from kvjax.eval.tasks.sample import Sample, new_tokens
from kvjax.hosts.arrays import fetch
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.state.cache import Cache
from kvjax.steps import Run

# Marks a token with NaN logits in the results of `generate_answers`.
NOT_A_NUMBER = -2


def row_new_tokens(rows: QuestionRows) -> Int[np.ndarray, "B"]:
    """How many tokens the last sample of each row generates; 0 for padding rows."""
    out = np.zeros(rows.forced.shape[0], np.int32)
    for i, turns in enumerate(rows.turns):
        out[i] = new_tokens(turns[-1][1])
    return out


def predicted(sample: Sample, said: Int[np.ndarray, "S"], start: int) -> list[int]:
    """Return a sample's answer in a row of `generate_answers`; `start`: the step predicting its first token.

    >>> from kvjax.eval.tasks.sample import ForcedSample
    >>> sample = ForcedSample("one", "get", context=(5,), question=(3,), answer=(7, 8), spans=())
    >>> predicted(sample, np.array([3, 7, 9, 5], np.int32), 1)
    [7, 9]
    """
    count = new_tokens(sample) or len(sample.answer)
    return [int(i) for i in said[start : start + count] if i >= 0]


@partial(jax.jit, static_argnames=("run", "width"))
def generate_answers(
    run: Run,
    params: Params,
    cache: Cache,
    forced: Int[Array, "B F"],
    count: Int[Array, "B"],
    again: Bool[Array, "B"],
    new: Int[Array, "B"],
    stop: Int[Array, "N"],
    *,
    width: int,
) -> Int[Array, "B S"]:
    """Greedy predictions of S = F + width steps: after every forced token, then after the model's own.

    Row b is fed forced[b, :count[b]] one by one and then its own predictions until new[b] tokens are
    generated or one of `stop` is predicted. Steps that a row did not run, and the stop token that ended it,
    are -1; tokens with NaN logits are -2. again: the first forced token is the prompt's last one, read again.
    width (static): at least new.max().
    """
    fed = jnp.pad(forced, ((0, 0), (0, width)))
    limit = count + jnp.maximum(new - 1, 0)

    def unfinished(carry: tuple[Array, Cache, Array, Array]) -> Array:
        i, _, _, done = carry
        return ((i < limit) & ~done).any()

    def body(carry: tuple[Array, Cache, Array, Array]) -> tuple[Array, Cache, Array, Array]:
        i, cache, said, done = carry
        own = said[:, jnp.maximum(i - 1, 0)]
        token = jnp.where(i < count, fed[:, i], jnp.maximum(own, 0))
        live = (i < limit) & ~done
        logits, cache = steps.step_fn(run, params, cache, token, live & ~(again & (i == 0)))
        best = jnp.argmax(logits, -1).astype(jnp.int32)
        # argmax returns the first NaN, if there is one.
        top = jnp.take_along_axis(logits, best[:, None], axis=1)[:, 0]
        best = jnp.where(jnp.isnan(top), NOT_A_NUMBER, best)
        ends = (new > 0) & (i >= count - 1) & (best[:, None] == stop[None]).any(-1)
        said = said.at[:, i].set(jnp.where(live & ~ends, best, -1))
        return i + 1, cache, said, done | ends

    start = jnp.zeros((), jnp.int32), cache, jnp.full_like(fed, -1), jnp.zeros(count.shape, bool)
    return jax.lax.while_loop(unfinished, body, start)[2]


class Expected(NamedTuple):
    """The model's predictions after each token that it is fed.

    likeliest: the most probable next token, `NOT_A_NUMBER` for NaN logits; -1 where nothing was fed. nll:
    -log p of the answer's token there, in nats; 0 where none has to follow.
    """

    likeliest: Int[np.ndarray, "B F"]
    nll: Float[np.ndarray, "B F"]


def feed_answers(model: Model, run: Run, params: Params, cache: Cache, rows: QuestionRows) -> Expected:
    """Feed the forced tokens of a batch whose answers are all given, in one pass if that equals steps.

    It takes single steps if a method evicts or retrieves at each of them. The cache is consumed.
    """
    targets = jnp.asarray(targets_of(rows))
    tokens, count, again = rows.forced, rows.count, rows.again
    if not takes_fewer_passes(model, run, cache, count):
        given = map(jnp.asarray, (tokens, count, again))
        found = _stepped(run, params, cache, *given, targets)
        return Expected(*map(fetch, found))
    if not again.any():
        logits, _ = passes(run, params, cache, PaddedTokens(tokens, count), tokens.shape[1])
        return Expected(*map(fetch, _expected(logits, jnp.asarray(count), targets)))
    # Reads the prompt's last token again, without storing it a second time.
    logits, cache = _asked_again(run, params, cache, jnp.asarray(tokens[:, 0]))
    first = _expected(logits[:, None], jnp.asarray(count), targets[:, :1])
    if (count < 2).all():
        rest = Expected(np.full_like(tokens[:, 1:], -1), np.zeros(tokens[:, 1:].shape, np.float32))
    else:
        logits, _ = passes(run, params, cache, PaddedTokens(tokens[:, 1:], count - 1), tokens.shape[1] - 1)
        rest = _expected(logits, jnp.asarray(count - 1), targets[:, 1:])
    pairs = zip(map(fetch, first), map(fetch, rest), strict=True)
    return Expected(*(np.concatenate(pair, 1) for pair in pairs))


@jax.jit
def _expected(
    logits: Float[Array, "B F V"], count: Int[Array, "B"], targets: Int[Array, "B F"]
) -> tuple[Int[Array, "B F"], Float[Array, "B F"]]:
    """Return the likeliest token after each of the first `count`, and -log p of the targets."""
    wide = logits.astype(jnp.float32)
    best = jnp.argmax(wide, -1).astype(jnp.int32)
    # argmax returns the first NaN, if there is one.
    top = jnp.take_along_axis(wide, best[..., None], -1)[..., 0]
    best = jnp.where(jnp.isnan(top), NOT_A_NUMBER, best)
    best = jnp.where(jnp.arange(best.shape[1])[None] < count[:, None], best, -1)
    right = jnp.take_along_axis(wide, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    nll = jax.nn.logsumexp(wide, -1) - right
    return best, jnp.where(targets < 0, 0.0, nll)


@partial(jax.jit, static_argnames=("run",))
def _asked_again(
    run: Run, params: Params, cache: Cache, token: Int[Array, "B"]
) -> tuple[Float[Array, "B V"], Cache]:
    return steps.step_fn(run, params, cache, token, jnp.zeros(token.shape, bool))


@partial(jax.jit, static_argnames=("run",))
def _stepped(
    run: Run,
    params: Params,
    cache: Cache,
    tokens: Int[Array, "B F"],
    count: Int[Array, "B"],
    again: Bool[Array, "B"],
    targets: Int[Array, "B F"],
) -> tuple[Int[Array, "B F"], Float[Array, "B F"]]:
    """Like `_expected`, with one step per token."""

    def unfinished(carry: tuple[Array, Cache, Array, Array]) -> Array:
        return (carry[0] < count).any()

    def body(carry: tuple[Array, Cache, Array, Array]) -> tuple[Array, Cache, Array, Array]:
        i, cache, best, nll = carry
        live = i < count
        logits, cache = steps.step_fn(run, params, cache, tokens[:, i], live & ~(again & (i == 0)))
        found, lost = _expected(logits[:, None], live.astype(jnp.int32), targets[:, i, None])
        return i + 1, cache, best.at[:, i].set(found[:, 0]), nll.at[:, i].set(lost[:, 0])

    start = jnp.zeros((), jnp.int32), cache, jnp.full_like(tokens, -1), jnp.zeros(tokens.shape, jnp.float32)
    return jax.lax.while_loop(unfinished, body, start)[2:]
