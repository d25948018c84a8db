"""Lanes: each request has a cache of its own; caches of one method and size are stacked and step together.

This works for every method: a step is the step of a cache of one row, mapped over the stack (`jax.vmap`). A
prompt is read in one go when its last chunk is scheduled, because a method selects among all of its tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.api.step import stepping
from kvjax.api.types import Step as OneStep
from kvjax.serve.device.jobs import GeneratedToken, Job
from kvjax.serve.device.reading import read_alone
from kvjax.serve.device.write import (
    WrittenTokens,
    draws_of,
    first_token,
    replayed,
    top_of,
    write_slice,
    written,
)
from kvjax.state.cache import Cache, lies_far

FIRST_ROWS = 4


class LaneStep(NamedTuple):
    """A step of R caches of one row, for `write_slice`. apart: the state is one cache, not a stack."""

    one: OneStep
    apart: bool

    def __call__(
        self, params: Any, state: Cache, token: Int[Array, "R"], active: Bool[Array, "R"]
    ) -> tuple[Float[Array, "R V"], Cache]:
        if self.apart:
            return self.one(params, state, token, active)

        def each(cache: Cache, token: Int[Array, ""], active: Bool[Array, ""]) -> tuple[Array, Cache]:
            return self.one(params, cache, token[None], active[None])

        logits, state = jax.vmap(each)(state, token, active)
        return logits[:, 0], state


@partial(jax.jit, donate_argnames=("stack",))
def put(stack: Cache, one: Cache, row: Int[Array, ""] | np.int32) -> Cache:
    """Write a cache to a row of the stack."""
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, row, 0), stack, one)


@jax.jit
def take(stack: Cache, row: Int[Array, ""] | np.int32) -> Cache:
    """Return the cache in a row of the stack."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, row, 0, keepdims=False), stack)


@partial(jax.jit, static_argnames="rows")
def grown(one: Cache | None, stack: Cache | None, rows: int) -> Cache:
    """Append `rows` empty rows to a stack; without a stack, make one for caches like `one`."""
    like = stack if one is None else jax.tree.map(lambda x: x[None][:0], one)
    return jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros((rows, *x.shape[1:]), x.dtype)]), like)


class LaneCaches:
    """The caches of all requests of one method whose prompts and outputs have the same static size."""

    def __init__(self, job: Job, size: int):
        self.size = size
        one, self.params = stepping(job.model, job.method, None)
        self.one, self.apart = one, False
        self.stack: Cache | None = None
        self.rows: dict[int, int] = {}
        self.alone: dict[int, Cache] = {}
        self.free: list[int] = []
        self.away: dict[int, Any] = {}

    def read(self, job: Job, start: int, count: int, goal: int) -> GeneratedToken | None:
        """Read the prompt once its last tokens are scheduled; return the next token, else None."""
        if start + count < goal:
            return None
        logits, cache = read_alone(job, self.size)
        self._store(job.id, cache)
        return replayed(job, self._steps) or first_token(job, logits)

    def write(self, jobs: list[Job], n: int) -> WrittenTokens:
        """Run up to n steps of some jobs, each of which stores its last token."""
        return self._steps(jobs, [job.written[-1] for job in jobs], n)

    def _steps(self, jobs: list[Job], tokens: list[int], n: int) -> WrittenTokens:
        if self.apart:
            return self._one_by_one(jobs, tokens)
        where = [self.rows[job.id] for job in jobs]
        rows = len(self.rows) + len(self.free)
        token, active = np.zeros(rows, np.int32), np.zeros(rows, bool)
        token[where], active[where] = tokens, True
        draws, step = draws_of(jobs, where, rows), LaneStep(self.one, False)
        args = token, active, draws, np.int32(n), top_of(jobs)
        done = write_slice(step, self.params, self.stack, *args)
        self.stack = done.state
        return written(done, where)

    def _one_by_one(self, jobs: list[Job], tokens: list[int]) -> WrittenTokens:
        """One step of each job, one job after the other."""
        found, step = [], LaneStep(self.one, True)
        for job, token in zip(jobs, tokens, strict=True):
            args = np.array([token], np.int32), np.ones(1, bool), draws_of([job], [0], 1), np.int32(1)
            done = write_slice(step, self.params, self.alone[job.id], *args, top_of(jobs))
            self.alone[job.id] = done.state
            found.append(written(done, [0]))
        return WrittenTokens(1, *(np.concatenate(x) for x in zip(*(one[1:] for one in found), strict=True)))

    def _store(self, id: int, cache: Cache) -> None:
        if any(jax.tree.leaves(lies_far(cache))):
            # Slots in host memory cannot be stacked, so such caches step one after the other.
            self.apart = True
            self.alone[id] = cache
            return
        if self.stack is None:
            self.stack, self.free = grown(cache, None, FIRST_ROWS), [*range(FIRST_ROWS)]
        if not self.free:
            held = len(self.rows)
            self.stack = grown(None, self.stack, held)
            self.free = [*range(held, 2 * held)]
        row = self.rows[id] = self.free.pop(0)
        self.stack = put(self.stack, cache, np.int32(row))

    def drop(self, id: int) -> None:
        """Forget a request."""
        if id in self.rows:
            self.free.append(self.rows.pop(id))
        self.alone.pop(id, None)
        self.away.pop(id, None)

    def leave(self, id: int) -> None:
        """Move a request's cache to the host."""
        if id in self.rows:
            row = self.rows.pop(id)
            self.away[id] = jax.device_get(take(self.stack, np.int32(row)))
            self.free.append(row)
        else:
            self.away[id] = self.alone.pop(id)

    def come_back(self, job: Job, table: list[int]) -> None:
        """Move a request's cache back to the device."""
        self._store(job.id, self.away.pop(job.id))

    def holds(self) -> set[int]:
        """Return the requests whose caches are on the device."""
        return {*self.rows, *self.alone}
