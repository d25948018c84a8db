"""Programs that generate tokens: a slice of decode steps for rows at different positions of their texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.api.sampling import GREEDY, Sampler, Settings, chosen, logprob_of
from kvjax.hosts.arrays import fetch
from kvjax.models.layers import Params
from kvjax.serve.device.jobs import Job

# A token and its log-probability.
Token = tuple[int, float]
# The most tokens that the device generates before the host checks them.
SLICE = 16
STOPS = 8


# A decode step: (params, state, token [R], active [R]) to (logits [R, V], state); hashable.
Step = Callable[[Any, Any, Array, Array], tuple[Array, Any]]


class Draws(NamedTuple):
    """How tokens are drawn: token `at` of a row by its key folded with `at`, as in `kvjax.generate`."""

    settings: Settings
    keys: Int[Array, "R _"]
    at: Int[Array, "R"]
    stop: Int[Array, "R S"]


class Slice(NamedTuple):
    """The result of a slice of `count` steps."""

    count: Int[Array, ""]
    token: Int[Array, "R"]
    tokens: Int[Array, "R slice"]
    logprobs: Float[Array, "R slice"]
    over: Bool[Array, ""]
    state: Any


def draws_of(jobs: Sequence[Job], where: Sequence[int], rows: int) -> Draws:
    """The `Draws` of some jobs, each in its row of `rows`."""
    settings = Settings(*(np.repeat(x[None], rows, 0) for x in Sampler().settings))
    keys = np.zeros((rows, *jobs[0].key.shape), np.uint32)
    at = np.zeros(rows, np.int32)
    most = max(len(job.stop) for job in jobs)
    stop = np.full((rows, -(-max(most, 1) // STOPS) * STOPS), -1, np.int32)
    for row, job in zip(where, jobs, strict=True):
        for numbers, one in zip(settings, job.sampler.settings, strict=True):
            numbers[row] = one
        keys[row], at[row], stop[row, : len(job.stop)] = job.key, len(job.written), job.stop
    return Draws(settings, keys, at, stop)  # type: ignore[arg-type]  # they go to the device by the call


def drawn(
    draws: Draws, logits: Float[Array, "R V"], more: Int[Array, ""] | int
) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """The next token of every row, and its log-probability."""
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(draws.keys), draws.at + more)

    def each(logits: Float[Array, "R V"]) -> Int[Array, "R"]:
        one = lambda how, row, key: chosen(how, row[None], key[None])[0]  # noqa: E731
        return jax.vmap(one)(draws.settings, logits, keys)

    def likeliest(logits: Float[Array, "R V"]) -> Int[Array, "R"]:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    token = jax.lax.cond((draws.settings.kind == GREEDY).all(), likeliest, each, logits)
    return token, logprob_of(logits, token)


_first = jax.jit(drawn)


def first_token(job: Job, logits: Float[Array, "1 V"]) -> Token:
    """Draws a job's next token after what it has read."""
    token, logprob = fetch(_first(draws_of([job], [0], 1), logits, np.int32(0)))
    return int(token[0]), float(logprob[0])


@partial(jax.jit, static_argnames=("step",), donate_argnames=("state",))
def write_slice(
    step: Step,
    params: Params,
    state: Any,
    token: Int[Array, "R"],
    active: Bool[Array, "R"],
    draws: Draws,
    n: Int[Array, ""] | np.int32,
) -> Slice:
    """Runs up to n <= SLICE steps of the active rows; each stores a row's token and draws the next one.

    It ends after a step in which a row draws a stop token, or a token whose log-probability is NaN.
    """

    def goes_on(now: Slice) -> Array:
        return (now.count < n) & ~now.over

    def one(now: Slice) -> Slice:
        logits, state = step(params, now.state, now.token, active)
        found, heard = drawn(draws, logits, now.count)
        found = jnp.where(active, found, now.token)
        ends = (found[:, None] == draws.stop).any(-1) | jnp.isnan(heard)
        tokens = jax.lax.dynamic_update_index_in_dim(now.tokens, found, now.count, 1)
        logprobs = jax.lax.dynamic_update_index_in_dim(now.logprobs, heard, now.count, 1)
        return Slice(now.count + 1, found, tokens, logprobs, (active & ends).any(), state)

    blank = jnp.zeros((token.shape[0], SLICE))
    start = Slice(
        jnp.int32(0), token, blank.astype(jnp.int32), blank.astype(jnp.float32), jnp.zeros((), bool), state
    )
    return jax.lax.while_loop(goes_on, one, start)


class Written(NamedTuple):
    """The tokens that `count` steps generated for some jobs, one row for each job."""

    count: int
    tokens: Int[np.ndarray, "J n"]
    logprobs: Float[np.ndarray, "J n"]


def written(done: Slice, where: Sequence[int]) -> Written:
    """The results of a slice for the jobs in these rows, on the host."""
    count, tokens, logprobs = fetch((done.count, done.tokens, done.logprobs))
    here, n = list(where), int(count)
    return Written(n, tokens[here, :n], logprobs[here, :n])


def replayed(job: Job, steps: Callable[[list[Job], list[int], int], Written]) -> Token | None:
    """Reads again what a preempted job had generated; returns the next token, None if there was nothing.

    It reads token by token, because the method selects among the tokens of the prompt alone.
    """
    found = None
    for token in job.written:
        found = steps([job], [token], 1)
    return None if found is None else (int(found.tokens[0, -1]), float(found.logprobs[0, -1]))
