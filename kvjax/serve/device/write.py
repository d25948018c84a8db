"""Programs that generate tokens: a slice of decode steps for rows at different positions of their texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.api.sampling import GREEDY, Sampler, Settings, chosen, logprob_of
from kvjax.hosts.arrays import fetch
from kvjax.models.layers import Params
from kvjax.serve.device.jobs import TOP, GeneratedToken, Job

# The most tokens that the device generates before the host checks them.
SLICE = 16
STOPS = 8


# A decode step: (params, state, token [R], active [R]) to (logits [R, V], state); hashable.
Step = Callable[[Any, Any, Array, Array], tuple[Array, Any]]


class RowDraws(NamedTuple):
    """How tokens are drawn: token `at` of a row by its key folded with `at`, as in `kvjax.generate`."""

    settings: Settings
    keys: Int[Array, "R _"]
    at: Int[Array, "R"]
    stop: Int[Array, "R S"]


class Drawn(NamedTuple):
    """The next token of every row, its log-probability, and those of the N likeliest tokens."""

    token: Int[Array, "R"]
    logprob: Float[Array, "R"]
    top: Int[Array, "R N"]
    top_logprobs: Float[Array, "R N"]


class SliceResult(NamedTuple):
    """The result of a slice of `count` steps. found: what was drawn, by row and step."""

    count: Int[Array, ""]
    token: Int[Array, "R"]
    found: tuple[Array, ...]
    over: Bool[Array, ""]
    state: Any


def draws_of(jobs: Sequence[Job], where: Sequence[int], rows: int) -> RowDraws:
    """Build the `RowDraws` of some jobs, each in its row of `rows`."""
    settings = Settings(*(np.repeat(x[None], rows, 0) for x in Sampler().settings))
    keys = np.zeros((rows, *jobs[0].key.shape), np.uint32)
    at = np.zeros(rows, np.int32)
    most = max(len(job.stop) for job in jobs)
    stop = np.full((rows, -(-max(most, 1) // STOPS) * STOPS), -1, np.int32)
    for row, job in zip(where, jobs, strict=True):
        for numbers, one in zip(settings, job.sampler.settings, strict=True):
            numbers[row] = one
        keys[row], at[row], stop[row, : len(job.stop)] = job.key, len(job.written), job.stop
    return RowDraws(settings, keys, at, stop)  # type: ignore[arg-type]  # they go to the device by the call


def drawn(draws: RowDraws, logits: Float[Array, "R V"], more: Int[Array, ""] | int, top: int) -> Drawn:
    """Draw the next token of every row, and name the `top` likeliest, or all if there are fewer."""
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(draws.keys), draws.at + more)

    def each(logits: Float[Array, "R V"]) -> Int[Array, "R"]:
        one = lambda how, row, key: chosen(how, row[None], key[None])[0]  # noqa: E731
        return jax.vmap(one)(draws.settings, logits, keys)

    def likeliest(logits: Float[Array, "R V"]) -> Int[Array, "R"]:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    token = jax.lax.cond((draws.settings.kind == GREEDY).all(), likeliest, each, logits)
    all_of_them = jax.nn.log_softmax(logits.astype(jnp.float32))
    best, ids = jax.lax.top_k(all_of_them, min(top, logits.shape[1]))
    return Drawn(token, logprob_of(logits, token), ids, best)


_first = jax.jit(drawn, static_argnames=("top",))


def first_token(job: Job, logits: Float[Array, "1 V"]) -> GeneratedToken:
    """Draw a job's next token after what it has read."""
    found = fetch(_first(draws_of([job], [0], 1), logits, np.int32(0), top_of([job])))
    return next(WrittenTokens(1, *(np.asarray(x)[:, None] for x in found)).of(0))


def top_of(jobs: Sequence[Job]) -> int:
    """How many of the likeliest tokens a program names for these jobs: none or `TOP`, so that few compile."""
    return TOP if any(job.top for job in jobs) else 0


def slice_of(
    step: Step,
    params: Params,
    state: Any,
    token: Int[Array, "R"],
    active: Bool[Array, "R"],
    draws: RowDraws,
    n: Int[Array, ""] | np.int32,
    top: int,
) -> SliceResult:
    """Run up to n <= SLICE steps of the active rows; each stores a row's token and draws the next one.

    It ends after a step in which a row draws a stop token, or a token whose log-probability is NaN.
    """

    def goes_on(now: SliceResult) -> Array:
        return (now.count < n) & ~now.over

    def one(now: SliceResult) -> SliceResult:
        logits, state = step(params, now.state, now.token, active)
        new = drawn(draws, logits, now.count, top)
        new = new._replace(token=jnp.where(active, new.token, now.token))
        ends = (new.token[:, None] == draws.stop).any(-1) | jnp.isnan(new.logprob)
        found = tuple(
            jax.lax.dynamic_update_index_in_dim(x, y, now.count, 1)
            for x, y in zip(now.found, new, strict=True)
        )
        return SliceResult(now.count + 1, new.token, found, (active & ends).any(), state)

    def blank(x: jax.ShapeDtypeStruct) -> Array:
        return jnp.zeros((x.shape[0], SLICE, *x.shape[1:]), x.dtype)

    logits = jax.eval_shape(lambda: step(params, state, token, active)[0])
    new = jax.eval_shape(partial(drawn, draws, more=0, top=top), logits)
    start = SliceResult(jnp.int32(0), token, tuple(map(blank, new)), jnp.zeros((), bool), state)
    return jax.lax.while_loop(goes_on, one, start)


write_slice = jax.jit(slice_of, static_argnames=("step", "top"), donate_argnames=("state",))


class WrittenTokens(NamedTuple):
    """The tokens that `count` steps generated for some jobs, one row for each job."""

    count: int
    tokens: Int[np.ndarray, "J n"]
    logprobs: Float[np.ndarray, "J n"]
    top: Int[np.ndarray, "J n N"]
    top_logprobs: Float[np.ndarray, "J n N"]

    def of(self, job: int) -> Iterator[GeneratedToken]:
        """Yield the tokens of one of the jobs."""
        rows = (x[job].tolist() for x in self[1:])
        for token, logprob, top, logprobs in zip(*rows, strict=True):
            yield GeneratedToken(token, logprob, [*zip(top, logprobs, strict=True)])


def written(done: SliceResult, where: Sequence[int]) -> WrittenTokens:
    """Fetch the results of a slice for the jobs in these rows to the host."""
    count, found = fetch((done.count, done.found))
    here, n = list(where), int(count)
    return WrittenTokens(n, *(np.asarray(x)[here, :n] for x in found))


def replayed(job: Job, steps: Callable[[list[Job], list[int], int], WrittenTokens]) -> GeneratedToken | None:
    """Read again what a preempted job had generated; return the next token, None if there was nothing.

    It reads token by token, because the method selects among the tokens of the prompt alone.
    """
    found = None
    for token in job.written:
        found = steps([job], [token], 1)
    return None if found is None else [*found.of(0)][-1]
