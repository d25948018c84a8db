"""The runner: one prefill per batch of prompts, shared by every cell; then compress, ask, score.

A unit is (batch, protocol, cell); its rows are appended to a log as one line, so a killed run loses at most
the unit it was in.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax import steps
from kvjax.cache import Cache, kept_positions, nbytes
from kvjax.compress import unread_bytes
from kvjax.eval.cellplan import Entry
from kvjax.eval.rows import Rows
from kvjax.eval.suite import Suite
from kvjax.grammar import Method
from kvjax.keep.patterns import Recent
from kvjax.models.model import Model
from kvjax.models.transformer import Params
from kvjax.steps import Prompt, Run

observe = jax.jit(steps.observe, static_argnames=("run", "needs"))


@partial(jax.jit, static_argnames=("run", "tokens", "room"))
def settle(run: Run, params: Params, prompt: Prompt, *, tokens: int, room: int) -> Cache:
    """The compressed cache of a prompt that was read before."""
    return steps.settle(run, params, prompt, None, tokens=tokens, room=room, compress=True)


@partial(jax.jit, static_argnames=("run",))
def ask(
    run: Run,
    params: Params,
    cache: Cache,
    forced: Int[Array, "B F"],
    count: Int[Array, "B"],
    again: Bool[Array, "B"],
) -> Int[Array, "B F"]:
    """Greedy predictions behind every forced token, fed one by one as in decoding."""

    def body(i: Array, carry: tuple[Cache, Array]) -> tuple[Cache, Array]:
        cache, said = carry
        append = (i < count) & ~(again & (i == 0))
        logits, cache = steps.step_fn(run, params, cache, forced[:, i], append)
        return cache, said.at[:, i].set(jnp.argmax(logits, -1).astype(jnp.int32))

    _, said = jax.lax.fori_loop(0, count.max(), body, (cache, jnp.zeros_like(forced)))
    return said


class Unit(NamedTuple):
    """What one cell did on one batch: result rows, and seconds per stage (None where compiling hid them)."""

    rows: list[dict[str, Any]]
    settle_s: float | None
    ask_s: float | None
    steps: int


def programs() -> int:
    """How many programs the runner has compiled in this process."""
    return sum(f._cache_size() for f in (observe, settle, ask))  # type: ignore[attr-defined]


def bare_run(model: Model, method: Method) -> Run:
    """The static part of compressing with a method: the asked token is protected for all alike."""
    return Run(model.config, method.protecting(Recent(1)))


class Runner:
    """Runs cells of one model over batches of rows; holds no results."""

    def __init__(self, model: Model, suite: Suite, entries: list[Entry], tokens: int, room: int):
        self.model, self.suite, self.entries = model, suite, entries
        self.tokens, self.room = tokens, room
        self.plain = Run(model.config, Method())
        needs = (steps.needs_of(bare_run(model, e.method), model.params) for e in entries)
        self.needs = frozenset().union(*needs)
        self.bytes: dict[Entry, tuple[int, int]] = {}

    def prompt(self, rows: Rows) -> tuple[Prompt, float | None]:
        """The shared prefill of a batch and its seconds."""
        before = programs()
        start = time.perf_counter()
        out = observe(
            self.plain,
            self.model.params,
            jnp.asarray(rows.prompt),
            jnp.asarray(rows.length),
            None,
            self.needs,
        )
        jax.block_until_ready(out)
        return out, None if programs() > before else time.perf_counter() - start

    def bytes_of(self, entry: Entry, prompt: Prompt) -> tuple[int, int]:
        """Measured bytes per row: held at the end of prefill, without room, and read by one decode step."""
        if entry not in self.bytes:
            run = bare_run(self.model, entry.method)
            build = partial(settle, run, tokens=self.tokens, room=0)
            cache = jax.eval_shape(build, self.model.params, prompt)
            rows = prompt.context.length.shape[0]
            held = nbytes(cache)
            unread = sum(
                unread_bytes(gm, group)
                for gm, group in zip(run.groups(self.model.params), cache.groups, strict=True)
            )
            self.bytes[entry] = held // rows, (held - unread) // rows
        return self.bytes[entry]

    def unit(self, entry: Entry, prompt: Prompt, rows: Rows, protocol: str, full_bytes: int) -> Unit:
        """Compress, ask and score one cell on one batch."""
        run, params = bare_run(self.model, entry.method), self.model.params
        before = programs()
        t0 = time.perf_counter()
        cache = settle(run, params, prompt, tokens=self.tokens, room=self.room)
        jax.block_until_ready(cache)
        t1 = time.perf_counter()
        compiled_settle = programs() > before
        kept = [np.asarray(p) for p in kept_positions(cache)]
        before = programs()
        t2 = time.perf_counter()
        decode = Run(self.model.config, entry.method.decode_part())
        said = np.asarray(
            ask(decode, params, cache, *map(jnp.asarray, (rows.forced, rows.count, rows.again)))
        )
        t3 = time.perf_counter()
        kept_bytes, read_bytes = self.bytes_of(entry, prompt)
        seconds = (t1 - t0 + t3 - t2) / len(rows.turns)
        out = [
            {
                "id": sample.id,
                "method": entry.label,
                "budget": entry.budget,
                "task": sample.task,
                "protocol": protocol,
                "prediction": " ".join(self.suite.words(prediction)),
                "answer": " ".join(self.suite.words(sample.answer)),
                "score": self.suite.score(sample.task, prediction, sample.answer),
                "kept_bytes": kept_bytes,
                "full_bytes": full_bytes,
                "read_bytes": read_bytes,
                "span_kept": _span_kept(kept, row, sample.spans),
                "seconds": seconds,
            }
            for row, turns in enumerate(rows.turns)
            for sample, prediction in _predictions(turns, said[row])
        ]
        compiled_ask = programs() > before
        return Unit(
            out,
            None if compiled_settle else t1 - t0,
            None if compiled_ask else t3 - t2,
            int(rows.count.max()) * rows.prompt.shape[0],
        )

    def kept_share(self, entry: Entry, prompt: Prompt, row: int) -> np.ndarray:
        """Per token of a prompt, the share of (layer, head) lists that still hold it."""
        run = bare_run(self.model, entry.method)
        cache = settle(run, self.model.params, prompt, tokens=self.tokens, room=self.room)
        held = _held([np.asarray(p) for p in kept_positions(cache)], row, self.tokens)
        return held.mean(0)


def _predictions(turns: list[tuple[int, Any]], said: np.ndarray) -> Iterator[tuple[Any, list[int]]]:
    for start, sample in turns:
        yield sample, [int(x) for x in said[start : start + len(sample.answer)]]


def _held(kept: list[np.ndarray], row: int, tokens: int) -> np.ndarray:
    """[lists, tokens]: whether each (layer, head) of a row holds each position."""
    lists = [head for layer in kept for head in layer[row]]
    out = np.zeros((len(lists), tokens + 1), bool)
    for i, pos in enumerate(lists):
        out[i, np.where((pos >= 0) & (pos < tokens), pos, tokens)] = True
    return out[:, :tokens]


def _span_kept(kept: list[np.ndarray], row: int, spans: tuple[tuple[int, int], ...]) -> float | None:
    if not spans:
        return None
    need = np.concatenate([np.arange(a, b) for a, b in spans])
    return float(_held(kept, row, int(need.max()) + 1)[:, need].mean())
