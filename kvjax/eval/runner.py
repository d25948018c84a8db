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
from kvjax.eval.cellplan import Entry
from kvjax.eval.rows import Rows
from kvjax.eval.suite import Suite
from kvjax.grammar import Method
from kvjax.keep.patterns import Recent
from kvjax.models.model import Model
from kvjax.models.transformer import Params
from kvjax.segments import unread_bytes
from kvjax.steps import Prompt, Run

observe = jax.jit(steps.observe, static_argnames=("run", "needs"))


probed = jax.jit(steps.probed, static_argnames=("run", "probe"))


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
    """What one cell did on one batch.

    rows: lines of results.jsonl. seconds: per stage, None where compiling hid them. steps: tokens decoded.
    share: per token of the first prompt, the share of (layer, head) lists that held it.
    """

    rows: list[dict[str, Any]]
    seconds: dict[str, float] | None
    steps: int
    share: list[float]


def programs() -> int:
    """How many programs the runner has compiled in this process."""
    return sum(f._cache_size() for f in (observe, probed, settle, ask))  # type: ignore[attr-defined]


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
        keeps = (e.method.keep for e in entries)
        self.probes = list(dict.fromkeys(k.probe for k in keeps if k is not None and k.probe is not None))
        self.warm: set[Entry] = set()
        self.bytes: dict[Entry, tuple[int, int]] = {}

    def prompt(self, rows: Rows) -> tuple[Prompt, dict[str, float] | None]:
        """The shared prefill of a batch, probes included, and the seconds of each (None: it compiled)."""
        before, seconds = programs(), {}
        start = time.perf_counter()
        tokens, length = jnp.asarray(rows.prompt), jnp.asarray(rows.length)
        out = observe(self.plain, self.model.params, tokens, length, None, self.needs)
        jax.block_until_ready(out)
        seconds[""] = time.perf_counter() - start
        for probe in self.probes:
            start = time.perf_counter()
            out = probed(self.plain, self.model.params, out, probe)
            jax.block_until_ready(out)
            seconds[repr(probe)] = time.perf_counter() - start
        return out, None if programs() > before else seconds

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
        """Compress, ask and score one cell on one batch. The first time, when it compiles, is not timed."""
        run, params = bare_run(self.model, entry.method), self.model.params
        decode = Run(self.model.config, entry.method.decode_part())
        start = time.perf_counter()
        cache = settle(run, params, prompt, tokens=self.tokens, room=self.room)
        jax.block_until_ready(cache)
        settled = time.perf_counter()
        kept = [np.asarray(p) for p in kept_positions(cache)]
        asked = time.perf_counter()
        said = ask(decode, params, cache, *map(jnp.asarray, (rows.forced, rows.count, rows.again)))
        said = np.asarray(said)
        seconds = {"settle": settled - start, "ask": time.perf_counter() - asked}
        kept_bytes, read_bytes = self.bytes_of(entry, prompt)
        common = {
            "method": entry.label,
            "budget": entry.budget,
            "protocol": protocol,
            "kept_bytes": kept_bytes,
            "full_bytes": full_bytes,
            "read_bytes": read_bytes,
            "seconds": sum(seconds.values()) / len(rows.turns),
        }
        out = [
            self._row(sample, prediction, common, _span_kept(kept, row, sample.spans))
            for row, turns in enumerate(rows.turns)
            for sample, prediction in _predictions(turns, said[row])
        ]
        timed = entry in self.warm
        self.warm.add(entry)
        share = _held(kept, 0, int(rows.length[0])).mean(0)
        steps_run = int(rows.count.max()) * rows.prompt.shape[0]
        return Unit(out, seconds if timed else None, steps_run, [round(float(x), 3) for x in share])

    def _row(
        self, sample: Any, prediction: list[int], common: dict[str, Any], span: float | None
    ) -> dict[str, Any]:
        """One line of results.jsonl."""
        return {
            "id": sample.id,
            "task": sample.task,
            **common,
            "prediction": " ".join(self.suite.words(prediction)),
            "answer": " ".join(self.suite.words(sample.answer)),
            "score": self.suite.score(sample.task, prediction, sample.answer),
            "span_kept": span,
        }


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
