"""The runner: reads a batch of prompts once for all cells, then compresses, asks and scores per cell.

A unit is (batch, protocol, cell); its rows are appended to a log as one line, so a killed run loses at most
the unit it was in.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax import steps
from kvjax.api.chunks import bucket
from kvjax.api.nan_checks import check_scores, refuse_prompt, refuse_step
from kvjax.api.prepare import made
from kvjax.api.program_limit import forget_if_crowded
from kvjax.api.rows import take_rows
from kvjax.base.host_memory import trim
from kvjax.compat.layout_class import mesh_for
from kvjax.compress.capacity import as_used
from kvjax.compress.unread import unread_bytes
from kvjax.eval.run.answers import (
    NOT_A_NUMBER,
    feed_answers,
    generate_answers,
    predicted,
    row_new_tokens,
)
from kvjax.eval.run.cellplan import PlannedCell
from kvjax.eval.run.newest import keeping_newest
from kvjax.eval.run.scanned import runs_scanned, scanned
from kvjax.eval.tasks.rows import QuestionRows
from kvjax.eval.tasks.sample import Sample, Suite
from kvjax.grammar import Method
from kvjax.grammar.calls import hiding_of
from kvjax.grammar.fitted import with_fitted
from kvjax.grammar.keys import name_of
from kvjax.hosts.arrays import fetch, is_shared
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.place.trim import counted
from kvjax.state.cache import Cache, host_nbytes, kept_positions, nbytes
from kvjax.steps import PrefillOutputs, Run

X = TypeVar("X")
Y = TypeVar("Y")

observe = jax.jit(steps.observe, static_argnames=("run", "needs"))


probed = jax.jit(steps.probed, static_argnames=("run", "probe"))


@partial(jax.jit, static_argnames=("run", "tokens", "room"))
def settle(
    run: Run, params: Params, prompt: PrefillOutputs, *, tokens: int, room: int
) -> tuple[Cache, Array]:
    """Compress the cache of a prompt read before; return it, and which scores are NaN [layers, B]."""
    return steps.settled(run, params, prompt, None, tokens=tokens, room=room, compress=True)


_COMPILED = (observe, probed, settle, generate_answers)


class Unit(NamedTuple):
    """The result of one cell on one batch.

    rows: lines of results.jsonl. seconds: per stage, None if compiling hid them; "read" is one of them if the
    cell read its prompt separately. steps: tokens decoded. share: per token of the first prompt, the share of
    (layer, head) pairs that kept it.
    """

    rows: list[dict[str, Any]]
    seconds: dict[str, float] | None
    steps: int
    share: list[float]


class Bytes(NamedTuple):
    """Bytes per row: held in all, read by one decode step, and held in host memory."""

    kept: int
    read: int
    host: int

    def of_row(self, full: int) -> dict[str, int]:
        """Return the bytes as fields of a row of results; full: the bytes of the full cache."""
        host = {"host_bytes": self.host} if self.host else {}
        return {"kept_bytes": self.kept, "full_bytes": full, "read_bytes": self.read, **host}


def programs() -> int:
    """How many programs the runner has compiled in this process."""
    return sum(f._cache_size() for f in _COMPILED)  # type: ignore[attr-defined]


def two_at_a_time(make: Callable[[X], Y], xs: Iterable[X]) -> Iterator[tuple[X, Y]]:
    """(x, make(x)) as they finish, in two threads, because compiling a program keeps only one core busy.

    >>> sorted(two_at_a_time(str.upper, ["a", "b"]))
    [('a', 'A'), ('b', 'B')]
    """
    pool, wait = ThreadPoolExecutor(2), True
    waiting = {pool.submit(make, x): x for x in xs}
    try:
        for done in as_completed(waiting):
            yield waiting[done], done.result()
    except KeyboardInterrupt:
        wait = False  # do not wait for programs that still compile
        raise
    finally:
        pool.shutdown(wait, cancel_futures=True)


def bare_method(method: Method, newest: int = 1) -> Method:
    """Change the method to keep the newest tokens, too; the last one is read again."""
    return keeping_newest(method, newest)


def reads_apart(method: Method) -> bool:
    """Whether a method reads a prompt differently: with other weights or phases, or some tokens alone."""
    keep = method.keep
    own = keep is not None and (keep.narrow is not None or not keep.phase.first_alike)
    sentences = method.sentences
    own = own or any(hiding_of(one.keep) is not None or one.read_prompt is not None for one in sentences)
    return own or method.reread is not None or method.make is not None


def bare_run(model: Model, method: Method, newest: int = 1) -> Run:
    """Return the static settings of the program that compresses with a method for the model that it makes."""
    on = mesh_for(method, model.on_mesh)
    return Run(made(model, method).config, bare_method(method, newest), on_mesh=on)


class ProgramInputs(NamedTuple):
    """The inputs of a cell's programs: its model, and the parameters with the arrays of its words."""

    model: Model
    params: Params


class Runner:
    """Runs cells of one model over batches of rows; holds no results.

    gold: right answers are fed in one pass. scan: programs loop over equal layers (`scanned`), but for
    methods that treat these differently. together: whether other hosts hold parts of the model and run every
    cell with this one, in one order.
    """

    def __init__(
        self, model: Model, suite: Suite, entries: list[PlannedCell], tokens: int, room: int,
        gold: bool = False, scan: bool = False,
    ):  # fmt: skip
        self.unrolled = model
        self.model = model = scanned(model) if scan else model
        self.suite, self.entries, self.gold = suite, entries, gold
        self.together = is_shared(model.params)
        self.tokens, self.room = tokens, room
        self.plain = Run(model.config, Method(), on_mesh=model.on_mesh)
        self.params = with_fitted(model.params, *(entry.method for entry in entries))
        shared = [e for e in entries if not self.apart(e)]
        needs = (steps.needs_of(bare_run(model, e.method), model.params) for e in shared)
        self.needs = frozenset().union(*needs)
        keeps = (e.method.keep for e in shared)
        self.probes = list(dict.fromkeys(k.probe for k in keeps if k is not None and k.probe is not None))
        self.runs: Counter[tuple[PlannedCell, int]] = Counter()
        self.bytes: dict[tuple[PlannedCell, int], Bytes] = {}

    def apart(self, entry: PlannedCell) -> bool:
        """Whether a cell needs its own prefill, by its method or because it runs on another model."""
        return reads_apart(entry.method) or self.given(entry).model is not self.model

    def given(self, entry: PlannedCell) -> ProgramInputs:
        """Return the model that a cell runs on, with its parameters."""
        model = made(self.model if runs_scanned(self.model, entry.method) else self.unrolled, entry.method)
        if model is self.model:
            return ProgramInputs(model, self.params)
        return ProgramInputs(model, with_fitted(model.params, entry.method))

    def decoding(self, entry: PlannedCell) -> Run:
        """Return the static settings of a cell's steps."""
        on = mesh_for(entry.method, self.model.on_mesh)
        return Run(self.given(entry).model.config, entry.method.decode_part(), on_mesh=on)

    def prompt(self, rows: QuestionRows) -> tuple[PrefillOutputs, dict[str, float] | None]:
        """Run a batch's shared prefill and its probes; time each (None for all if one compiled)."""
        trim()
        before, seconds = programs(), {}
        start = time.perf_counter()
        tokens, length = jnp.asarray(rows.prompt), jnp.asarray(rows.length)
        out = observe(self.plain, self.params, tokens, length, None, self.needs)
        jax.block_until_ready(out)
        seconds[""] = time.perf_counter() - start
        if np.isnan(fetch(out.logits))[rows.length > 0].any():
            refuse_prompt(self.model, rows.prompt, rows.length)
        for probe in self.probes:
            start = time.perf_counter()
            out = probed(self.plain, self.params, out, probe)
            jax.block_until_ready(out)
            seconds[name_of(probe)] = time.perf_counter() - start
        return out, None if programs() > before else seconds

    def own(
        self, entry: PlannedCell, prompt: PrefillOutputs, rows: QuestionRows
    ) -> tuple[PrefillOutputs, float | None]:
        """Read the prompt that a cell compresses, and time the reading (None: it is the shared one)."""
        if not self.apart(entry):
            return prompt, None
        run, (model, params) = bare_run(self.model, entry.method, rows.newest), self.given(entry)
        start = time.perf_counter()
        tokens, length = jnp.asarray(rows.prompt), jnp.asarray(rows.length)
        out = observe(run, params, tokens, length, None, steps.needs_of(run, model.params))
        if run.method.keep is not None and run.method.keep.probe is not None:
            out = probed(run._replace(method=Method()), params, out, run.method.keep.probe)
        jax.block_until_ready(out)
        if np.isnan(fetch(out.logits))[rows.length > 0].any():
            refuse_prompt(model, rows.prompt, rows.length)
        return out, time.perf_counter() - start

    def bytes_of(self, entry: PlannedCell, prompt: PrefillOutputs, newest: int = 1) -> Bytes:
        """Measured bytes per row, at the end of prefill, without free slots.

        If the number of slots depends on the data, they are those of the first batch with this `newest`.
        """
        key = entry, newest if counted(entry.method) else 1
        if key not in self.bytes:
            run, (model, params) = bare_run(self.model, entry.method, newest), self.given(entry)
            build = partial(settle, run, tokens=self.tokens, room=0)
            if counted(entry.method):
                cache = as_used(run.groups(params), build(params, prompt)[0], bucket, 0)
            else:
                cache, _ = jax.eval_shape(build, params, prompt)
            rows = prompt.positions.length.shape[0]
            held = nbytes(cache)
            unread = sum(
                unread_bytes(gm, group, cache.pools)
                for gm, group in zip(run.groups(model.params), cache.groups, strict=True)
            )
            self.bytes[key] = Bytes(held // rows, (held - unread) // rows, host_nbytes(cache) // rows)
        return self.bytes[key]

    def compressed(self, entry: PlannedCell, prompt: PrefillOutputs, newest: int = 1) -> Cache:
        """Compress the cache of a prompt under a cell, once. InputError if a score is NaN.

        newest: how many of a prompt's last tokens stay.
        """
        run = bare_run(self.model, entry.method, newest)
        params = self.given(entry).params
        cache, lost = settle(run, params, prompt, tokens=self.tokens, room=self.room)
        jax.block_until_ready(cache)
        check_scores(entry.label, fetch(lost))
        return as_used(run.groups(params), cache, bucket, self.room) if counted(entry.method) else cache

    def units(
        self, make: Callable[..., X], todo: list[PlannedCell], timed: Iterable[PlannedCell] = ()
    ) -> Iterator[tuple[PlannedCell, X]]:
        """Yield (entry, make(entry)) as cells finish: two run at a time, then each of `timed` alone.

        make: takes `alone` too, true where no other cell runs beside it.
        """
        if self.together:
            yield from ((entry, make(entry, alone=True)) for entry in todo)
            return
        timed = [*timed]
        yield from two_at_a_time(make, [e for e in todo if e not in timed])
        yield from ((entry, make(entry, alone=True)) for entry in timed)

    def make_room(self) -> None:
        """Drop compiled programs if there are too many; then every cell must compile again."""
        if forget_if_crowded():
            self.runs.clear()

    def times_run(self, entry: PlannedCell, rows: QuestionRows) -> int:
        """How often a cell ran before on as many rows: the first time compiles and cannot be timed."""
        return self.runs[entry, rows.forced.shape[0]]

    def unit(
        self,
        entry: PlannedCell,
        prompt: PrefillOutputs,
        rows: QuestionRows,
        protocol: str,
        full_bytes: int,
        *,
        alone: bool,
    ) -> Unit:
        """Compresses, asks and scores one cell on one batch.

        It is timed if it runs alone on the machine, and not for the first time, because that compiles.
        """
        prompt, read = self.own(entry, prompt, rows)
        start = time.perf_counter()
        cache = self.compressed(entry, prompt, rows.newest)
        settled = time.perf_counter()
        kept = _given(kept_positions(cache), prompt.source)
        of = range(len(rows.turns)) if rows.of is None else rows.of.tolist()
        cache = cache if rows.of is None else take_rows(cache, rows.of)
        asked = time.perf_counter()
        said, nll = self._answers(entry, cache, rows)
        if (said == NOT_A_NUMBER).any():
            refuse_step(int(np.argwhere(said == NOT_A_NUMBER)[:, 1].min()), entry.label)
        seconds = {"settle": settled - start, "ask": time.perf_counter() - asked}
        seconds |= {} if read is None else {"read": read}
        size = self.bytes_of(entry, prompt, rows.newest)
        common = {
            "method": entry.label,
            "budget": entry.budget,
            "protocol": protocol,
            **size.of_row(full_bytes),
            "seconds": sum(seconds.values()) / len(rows.turns),
        }
        out = [
            self._row(
                sample, predicted(sample, said[row], at), common, _span_kept(kept, of[row], sample.spans)
            )
            | ({} if nll is None else {"nll": _nll(sample, nll[row, at:])})
            for row, turns in enumerate(rows.turns)
            for at, sample in turns
        ]
        timed = alone and self.times_run(entry, rows) > 0
        self.runs[entry, rows.forced.shape[0]] += 1
        share = _held(kept, 0, int(rows.length[0])).mean(0)
        steps_run = 0 if self.gold else int((said >= 0).any(0).sum()) * rows.forced.shape[0]
        return Unit(out, seconds if timed else None, steps_run, [round(float(x), 3) for x in share])

    def _answers(
        self, entry: PlannedCell, cache: Cache, rows: QuestionRows
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Predict after each token of a batch; return that, and -log p of right answers if these are fed."""
        (model, params), decode = self.given(entry), self.decoding(entry)
        if self.gold:
            found = feed_answers(model, decode, params, cache, rows)
            return found.likeliest, found.nll
        new, stop = row_new_tokens(rows), np.array(self.model.stop_ids or (-1,), np.int32)
        given = map(jnp.asarray, (rows.forced, rows.count, rows.again, new, stop))
        said = generate_answers(decode, params, cache, *given, width=self.room - rows.forced.shape[1])
        return fetch(said), None

    def _row(
        self, sample: Sample, prediction: list[int], common: dict[str, Any], span: float | None
    ) -> dict[str, Any]:
        """One line of results.jsonl."""
        graded = self.suite.grade(sample, prediction)._asdict()
        starts = [start for start, _ in sample.spans]
        tokens = len(sample.context)
        return {
            "id": sample.id,
            "task": sample.task,
            **common,
            **graded,
            "span_kept": span,
            "context_tokens": tokens,
            "depth": round(min(starts) / tokens, 4) if starts else None,
        }


def _given(kept: list[np.ndarray], source: Array | None) -> list[np.ndarray]:
    """Map kept positions from the tokens that were read to the prompts as given."""
    if source is None:
        return kept
    rows = fetch(source)[:, None]
    return [np.where(pos >= 0, np.take_along_axis(rows, np.maximum(pos, 0), axis=2), -1) for pos in kept]


def _held(kept: list[np.ndarray], row: int, tokens: int) -> np.ndarray:
    """Return [layer and head pairs, tokens]: whether each (layer, head) of a row holds each position."""
    lists = [head for layer in kept for head in layer[row]]
    out = np.zeros((len(lists), tokens + 1), bool)
    for i, pos in enumerate(lists):
        out[i, np.where((pos >= 0) & (pos < tokens), pos, tokens)] = True
    return out[:, :tokens]


def _nll(sample: Sample, nll: np.ndarray) -> float:
    """Compute the mean of -log p over the graded tokens of an answer, in nats."""
    parts = getattr(sample, "parts", ()) or ((0, len(sample.answer)),)
    return float(np.mean(np.concatenate([nll[a:b] for a, b in parts])))


def _span_kept(kept: list[np.ndarray], row: int, spans: tuple[tuple[int, int], ...]) -> float | None:
    if not spans:
        return None
    need = np.concatenate([np.arange(a, b) for a, b in spans])
    return float(_held(kept, row, int(need.max()) + 1)[:, need].mean())
