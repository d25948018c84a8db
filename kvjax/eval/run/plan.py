"""The plan of a comparison: its cells, its questions, and their batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from kvjax.api.chunks import bucket
from kvjax.base.checks import whole_number
from kvjax.base.errors import InputError
from kvjax.eval.run.cellplan import FIRST, Custom, PlannedCell, plan_cells
from kvjax.eval.run.memory import fitting_rows
from kvjax.eval.run.newest import check_newest, newest_of
from kvjax.eval.run.traced import check_traced
from kvjax.eval.tasks.functions import DRAWN, Task
from kvjax.eval.tasks.rows import PROTOCOLS, QuestionRows, forced_length, make_rows, prompts_of
from kvjax.eval.tasks.sample import Sample, Suite, new_tokens
from kvjax.eval.tasks.suite import make_suite
from kvjax.grammar import Method
from kvjax.models.model import Model

# The limit of contexts: all are drawn before anything runs, and are in memory.
MOST_SAMPLES = 100_000
# Answers that are fed are padded to a multiple of so many tokens, so that tasks share programs.
FED = 32
# Rows per batch: enough to fill the matrix units, few enough to stay in a CPU's cache.
BATCH_ROWS = 40


class ComparisonPlan(NamedTuple):
    """The plan of a comparison; `suites`, by seed, draw different questions, about `contexts` contexts each.

    gold: right answers are fed in one pass, and the model writes none.
    """

    model: Model
    suites: dict[int, Suite]
    entries: list[PlannedCell]
    protocols: tuple[str, ...]
    contexts: int
    tokens: int
    gold: bool = False

    @property
    def suite(self) -> Suite:
        return next(iter(self.suites.values()))


class ContextBatch(NamedTuple):
    """Rows that are read at once: whole contexts of one protocol and one seed.

    newest: how many of the prompts' last tokens stay, whatever the method.
    """

    protocol: str
    number: int
    seed: int
    rows: list[Sequence[Sample]]
    newest: int = 1


def seeds_of(seed: int, seeds: Sequence[int] | None, text: str | Path | None) -> tuple[int, ...]:
    """Return the seeds of a run; InputError if they do not fit together."""
    several = (seed,) if seeds is None else tuple(seeds)
    for one in several:
        if isinstance(one, bool) or not isinstance(one, int | np.integer) or one < 0:
            raise InputError(f"seed is {one!r}, expected a whole number >= 0, such as 0")
    if seeds is None:
        return several
    if seed or not several or len({*several}) < len(several):
        raise InputError(
            f"--seeds {' '.join(map(str, several))} and --seed {seed} were given, expected one of both, and "
            "every seed once: leave the others away"
        )
    if text is not None and len(several) > 1:
        raise InputError(
            "--seeds was given with --text, whose windows would overlap between seeds: raise --samples"
        )
    return several


def check_protocols(protocols: Sequence[str], samples: int) -> None:
    for p in protocols:
        if p not in PROTOCOLS:
            raise InputError(f"unknown protocol {p!r}: choose from {', '.join(PROTOCOLS)}")
    whole_number("samples", samples, 1, "contexts", MOST_SAMPLES)


def planned(
    model: Model,
    methods: Sequence[str | Method | Custom] | None,
    budgets: Sequence[float | int] | None,
    tasks: Sequence[str | Task] | None,
    protocols: tuple[str, ...],
    samples: int,
    length: int | None,
    seeds: tuple[int, ...],
    preset: str | None,
    baselines: bool = True,
    gold: bool = False,
    first: Sequence[str] = FIRST,
) -> tuple[ComparisonPlan, str]:
    """Plan a comparison, and return the plan and its preset; InputError for what cannot run."""
    asked = dict(length=length, contexts=samples, gold=gold)
    suites = [make_suite(model, tasks, seed=one, **asked) for one in seeds]  # type: ignore[arg-type]
    suite = suites[0]
    if len(suites) > 1 and not all(source.startswith(DRAWN) for source in suite.sources):
        raise InputError(
            "--seeds draws built-in questions anew, and those of a file are the same under every seed: leave "
            "--seeds away"
        )
    for p in protocols:
        suite.rows(0, p)
    preset = preset or ("short" if suite.length <= 1024 else "long")
    entries = plan_cells(model, methods, budgets, preset, baselines, first)
    check_traced(model, entries, bucket(suite.length))
    samples = min(samples, suite.contexts or samples)
    drawn = dict(zip(seeds, suites, strict=True))
    return ComparisonPlan(model, drawn, entries, protocols, samples, bucket(suite.length), gold), preset


def batches_of(plan: ComparisonPlan) -> list[ContextBatch]:
    """Return every batch. InputError if positions or a budget do not suffice.

    A batch holds whole contexts, or with `gold` rows of one task, whose answers are about equally long.
    """
    itemsize = jax.tree.leaves(plan.model.params)[0].dtype.itemsize
    out = []
    for protocol in plan.protocols:
        drawn = {
            s: [suite.rows(i, protocol) for i in range(plan.contexts)] for s, suite in plan.suites.items()
        }
        rows = [context for contexts in drawn.values() for context in contexts]
        _check_positions(plan.model, protocol, rows)
        newest = newest_of(protocol, (row for context in rows for row in context))
        for entry in plan.entries:
            check_newest(entry, protocol, newest, (len(row[0].context) for c in rows for row in c))
        size = fitting_rows(plan.model.config, plan.tokens, itemsize, BATCH_ROWS)
        pieces = [(s, piece) for s in drawn for piece in _pieces(plan, drawn[s], size)]
        for number, (seed, several) in enumerate(pieces):
            out.append(ContextBatch(protocol, number, seed, several, newest))
    # Alternates between protocols, so that a half-finished run covers all of them.
    return sorted(out, key=lambda b: b.number)


def arrays_of(plan: ComparisonPlan, batches: list[ContextBatch]) -> list[QuestionRows]:
    """Return the rows of every batch as arrays, which have one shape within a protocol."""
    forced = [bucket(max(forced_length(b.rows) for b in batches))] * len(batches)
    if plan.gold:
        forced = [-(-forced_length(b.rows, b.protocol) // FED) * FED for b in batches]
    size: dict[str, int] = {}
    prompts: dict[str, int] = {}
    for b in batches:
        size[b.protocol] = max(size.get(b.protocol, 0), len(b.rows))
        prompts[b.protocol] = max(prompts.get(b.protocol, 0), distinct(b))
    shared = {p: n if n < size[p] else None for p, n in prompts.items()}
    return [
        make_rows(b.rows, b.protocol, plan.tokens, width, size[b.protocol], b.newest, shared[b.protocol])
        for b, width in zip(batches, forced, strict=True)
    ]


def distinct(batch: ContextBatch) -> int:
    """How many distinct prompts a batch has: questions about the same context can share one."""
    return len({*prompts_of(batch.rows, batch.protocol)})


def _pieces(
    plan: ComparisonPlan, contexts: list[list[Sequence[Sample]]], size: int
) -> Iterator[list[Sequence[Sample]]]:
    """Yield the rows of each batch, about `size` of them."""
    if not plan.gold:
        per = max(1, size // max(len(context) for context in contexts))
        for start in range(0, len(contexts), per):
            yield [row for context in contexts[start : start + per] for row in context]
        return
    for start in range(0, len(contexts), size):
        for task in plan.suite.tasks:
            rows = [row for context in contexts[start : start + size] for row in context]
            if mine := [row for row in rows if row[0].task == task]:
                yield mine


def _check_positions(model: Model, protocol: str, rows: list[list[Sequence[Sample]]]) -> None:
    """Raise InputError if a row, its questions and its answers reach beyond the model's positions."""
    asked = lambda s: len(s.question) + len(s.answer) + new_tokens(s)  # noqa: E731
    longest = max(len(row[0].context) + sum(map(asked, row)) for context in rows for row in context)
    last = model.config.max_positions
    if longest > last:
        raise InputError(
            f"{protocol} prompts with their questions and answers take {longest} tokens, and {model.name} "
            f"has {last} positions: give a --length that is {longest - last} tokens shorter"
        )
