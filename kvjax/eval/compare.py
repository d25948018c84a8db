"""`kvjax compare`: every method on the same model, tokens and bytes, in one table."""

from __future__ import annotations

import dataclasses
import json
import platform
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

import kvjax
from kvjax.api.chunks import bucket
from kvjax.base.atomic_files import write_atomic
from kvjax.base.checks import listed, whole_number
from kvjax.base.errors import InputError
from kvjax.eval.report.cells import Cell, NominalBudget, summarise
from kvjax.eval.report.comparison_table import PROTOCOLS, print_table
from kvjax.eval.report.console import make_console
from kvjax.eval.report.duels import duels_of
from kvjax.eval.report.frontier import panels_of, write_frontier
from kvjax.eval.report.page import caption_of, write_report
from kvjax.eval.report.scores_section import Picture
from kvjax.eval.run.asking import Failure, ask, unit_key
from kvjax.eval.run.cellplan import Custom, PlannedCell, plan_cells
from kvjax.eval.run.command import command_of
from kvjax.eval.run.estimate import estimate
from kvjax.eval.run.examples import kept_examples, task_examples
from kvjax.eval.run.log import UnitLog, check_out, writing
from kvjax.eval.run.memory import peak_bytes
from kvjax.eval.run.perplexity import compare_text
from kvjax.eval.run.pictures import draw_pictures
from kvjax.eval.run.plan import ComparisonPlan, ContextBatch, batches_of, check_protocols, planned, seeds_of
from kvjax.eval.run.revision import revision
from kvjax.eval.run.runner import Unit, programs
from kvjax.eval.run.timings import CellTimings, timings_of
from kvjax.eval.run.traced import check_traced
from kvjax.eval.run.usual import usual_of
from kvjax.eval.tasks.functions import Task
from kvjax.eval.tasks.sample import LENGTH
from kvjax.eval.tasks.suite import notes_of
from kvjax.grammar import Method
from kvjax.hosts.messages import by_first, check_same, gathered, is_first
from kvjax.io.gin_bindings import load_preset
from kvjax.io.load import load
from kvjax.methods.user import sources
from kvjax.models.model import Model, check_single

# The version of results. Since 2, "aware" protects the question from eviction.
SCHEMA = 2
MORE = (
    "more: --methods well-known --budgets 0.5 0.25 0.125, --methods all, or names of `kvjax methods`; "
    "a task, model or text of your own: kvjax compare --help"
)


class Comparison(NamedTuple):
    """The results of `compare`: cells as in the table, rows as in results.jsonl, and where the files are."""

    cells: list[Cell]
    rows: list[dict[str, Any]]
    timings: dict[tuple[str, NominalBudget], dict[str, float]]
    metrics: dict[str, Any]
    out: Path


def compare(
    model: str | Model = "recall-tiny",
    methods: Sequence[str | Method | Custom] | None = None,
    *,
    budgets: Sequence[float | int] | None = None,
    tasks: Sequence[str | Task] | None = None,
    protocols: Sequence[str] | None = None,
    samples: int | None = None,
    length: int | None = None,
    text: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    preset: str | None = None,
    scores: bool = False,
    baselines: bool = True,
    gold: bool | None = None,
    console: Console | None = None,
    mesh: Any = None,
    rules: Any = None,
) -> Comparison:
    """Run methods on the same questions and print quality against measured bytes.

    On several hosts each runs a share of the methods, unless they hold the model together; the first writes
    and prints.

    Args:
        model: a model, or its name as in `kvjax.load`.
        methods: methods, or their texts. "well-known" names several, "all" for every one that needs no fit;
            None runs a few of each kind.
        budgets: fractions of the tokens, or numbers of slots per head.
        tasks: questions; None asks models that read English RULER's needles, others recall (`usual_of`).
        protocols: names such as "agnostic", which compresses a prompt without its question, and "aware",
            which compresses it with the question.
        samples: how many contexts are drawn per seed; results are over all seeds together.
        length: tokens of a context.
        text: a text file, whose perplexity is measured instead of asking questions.
        out: a folder for results.jsonl, metrics.json, frontier.png and report.html.
        resume: continues a run that was stopped.
        seed: the seed of the contexts.
        seeds: several seeds, in place of `seed`.
        preset: a file of hyper-parameters for all methods, "short" or "long".
        scores: the report also shows what every method scores and keeps of one prompt (`kvjax.scores`).
        baselines: also runs the full cache, random and sink+recent; without them, differences to the full
            cache are not reported.
        gold: feeds the right answers in one pass over the compressed cache (teacher forcing), which is faster
            than having the model write them. A score is then the share of references whose tokens are all the
            model's likeliest, and rows also hold `nll`, the mean of -log p over these tokens.
        console: where to print.
        mesh: as in `kvjax.load`, where `model` is a name.
        rules: as in `kvjax.load`.

    Returns:
        A `Comparison`: cells as in the table, rows as in results.jsonl, and where the files are.

    Raises:
        InputError: before any long work, for anything that cannot run. A method that fails later is left out,
            in `metrics["failed"]` and errors.txt; the last error is raised if all fail.

    >>> found = compare(methods=["snapkv"], budgets=[0.25], samples=2, tasks=["get"])  # doctest: +SKIP
    """
    check_model(model)
    console = (console or make_console()) if is_first() else Console(quiet=True)
    listed(methods=methods, budgets=budgets, tasks=tasks, protocols=protocols, seeds=seeds)
    length = None if length is None else whole_number("length", length, 1, "tokens per context")
    seeds = seeds_of(seed, seeds, text)
    _check_options(text, out, protocols, samples, scores)
    command = command_of(
        model=model if isinstance(model, str) else model.name, methods=methods, budgets=budgets, tasks=tasks,
        protocols=() if text else protocols or (), samples=samples, length=length, text=text, seeds=seeds,
        preset=preset, scores=scores, baselines=baselines, gold=bool(gold), mesh=mesh, rules=rules,
    )  # fmt: skip
    loaded = _loaded(model, mesh, rules)
    usual = usual_of(loaded)
    samples = usual.samples if samples is None else samples
    protocols = tuple(dict.fromkeys(protocols or usual.protocols))
    gold = usual.gold and tasks is None if gold is None else gold
    folder = Path(out or by_first(lambda: f"kvjax-results/{time.strftime('%Y%m%d-%H%M%S')}"))
    if text is not None:
        length = length or LENGTH
        entries = _entries(loaded, methods, budgets, preset, baselines, length)
        found = compare_text(
            loaded, entries, text, folder=folder, length=length, windows=samples, seed=seeds[0],
            resume=resume, about={**_about(loaded), "command": command}, console=console,
        )  # fmt: skip
        return Comparison([], found, {}, {}, folder)
    plan, preset = planned(
        loaded, methods, budgets, tasks, protocols, samples, length, seeds, preset, baselines, gold,
        usual.methods,
    )  # fmt: skip
    for note in (note for suite in plan.suites.values() for note in notes_of(suite)):
        console.print(note)
    found = _asked(
        plan, {"settings": _settings(plan, preset), "command": command}, folder, resume, scores, console
    )
    if methods is None:
        console.print(MORE, soft_wrap=True)
    return found


def _entries(
    model: Model,
    methods: Sequence[str | Method | Custom] | None,
    budgets: Sequence[float | int] | None,
    preset: str | None,
    baselines: bool,
    length: int,
) -> list[PlannedCell]:
    """Trace the cells of a comparison on a text once, so that what cannot run is refused here."""
    preset = preset or ("short" if length <= 1024 else "long")
    entries = plan_cells(model, methods, budgets, preset, baselines)
    check_traced(model, entries, bucket(length))
    return entries


def _asked(
    plan: ComparisonPlan, given: dict[str, Any], folder: Path, resume: bool, scores: bool, console: Console
) -> Comparison:
    """Answer the questions of a plan, and reports; given: settings and command for metrics.json."""
    started, batches = time.time(), batches_of(plan)
    log = UnitLog(folder, given["settings"], resume, (*Unit._fields, "read_s", "batch"))
    if not log.done and (told := estimate(plan, batches)):
        console.print(told)
    try:
        failed = [Failure(*one) for host in gathered(ask(plan, batches, log, console)) for one in host]
        log.join()
    finally:
        log.close()
    sample = batches[0].rows[0][0]
    pictures = draw_pictures(plan.model, plan.entries, plan.protocols[0], sample) if scores else []
    return _report(plan, batches, log, given, pictures, folder, started, console, failed)


def _check_options(
    text: str | Path | None,
    out: str | Path | None,
    protocols: Sequence[str] | None,
    samples: int | None,
    scores: bool,
) -> None:
    """Raise InputError for protocols, folders and options that cannot be, before the model is loaded."""
    check_protocols(protocols or (), 1 if samples is None else samples)
    if scores and text is not None:
        raise InputError(
            "--scores was given with --text, expected questions, whose answers attend: remove one of both"
        )
    check_out(out)


def check_model(model: Any) -> None:
    """Raise InputError if `model` is neither a model nor the name of one, for example a list of methods."""
    if not isinstance(model, str) and not hasattr(model, "params"):
        hint = "methods come second" if isinstance(model, list | tuple) else "load it first"
        raise InputError(f"model is {model!r:.80}, expected a name, or what kvjax.load returns: {hint}")


def _loaded(model: str | Model, mesh: Any, rules: Any) -> Model:
    """Load the model to compare on, the same on all hosts; InputError if it cannot answer questions."""
    if not isinstance(model, str) and (mesh is not None or rules is not None):
        raise InputError("mesh= or rules= was given with a model, which has its own: leave them out")
    loaded = load(model, mesh=mesh, rules=rules) if isinstance(model, str) else model
    check_single(
        loaded,
        "compare cannot ask it, but kvjax inspect sizes its caches and kvjax generate runs it",
    )
    check_same("models", loaded.fingerprint)
    return loaded


def _settings(plan: ComparisonPlan, preset: str) -> dict[str, Any]:
    seeds = list(plan.suites)
    return {
        "schema": SCHEMA,
        "model": plan.model.name,
        "fingerprint": plan.model.fingerprint,
        "cells": [[e.label, e.budget, repr(e.method)] for e in plan.entries],
        "method_sources": sources(e.method for e in plan.entries),
        "tasks": list(plan.suite.tasks),
        "sources": list(plan.suite.sources),
        "protocols": list(plan.protocols),
        "samples": plan.contexts,
        "length": plan.suite.length,
        "seed": seeds[0] if len(seeds) == 1 else seeds,
        "preset": {"name": preset, **bound_by(load_preset(preset), plan.entries)},
        **({"gold": True} if plan.gold else {}),
    }


def bound_by(preset: dict[str, Any], entries: Sequence[PlannedCell]) -> dict[str, Any]:
    """Take what a preset says of methods that run; a run can be resumed where it changed for others alone."""
    words = {word for entry in entries for word in re.findall(r"[\w-]+", entry.label)}
    return {id: given for id, given in preset.items() if id in words}


def _about(model: Model) -> dict[str, Any]:
    """Describe the environment of a run: the part of metrics.json that all comparisons share."""
    device = jax.local_devices()[0]
    return {
        "schema": SCHEMA,
        "model": model.name,
        "fingerprint": model.fingerprint,
        "parameters": sum(x.size for x in jax.tree.leaves(model.params)),
        "device": f"{device.device_kind} ({platform.processor() or platform.machine()})",
        "dtype": str(jax.tree.leaves(model.params)[0].dtype),
        "git_revision": revision(),
        "versions": {"kvjax": kvjax.__version__, "jax": jax.__version__, "numpy": np.__version__},
    }


def _report(
    plan: ComparisonPlan,
    batches: list[ContextBatch],
    log: UnitLog,
    given: dict[str, Any],
    pictures: list[Picture],
    folder: Path,
    started: float,
    console: Console,
    failed: Sequence[Failure] = (),
) -> Comparison:
    left_out = {one.cell for one in failed}
    plan = plan._replace(entries=[e for e in plan.entries if (e.label, e.budget) not in left_out])
    keys = [unit_key(batch.protocol, batch.number, entry) for batch in batches for entry in plan.entries]
    rows = [row for key in keys if key in log.done for row in log.done[key]["rows"]]
    cells, timings = summarise(rows), timings_of(plan.entries, log.done)
    preset = given["settings"]["preset"]
    metrics = {
        **_about(plan.model),
        **given,
        "seeds": list(plan.suites),
        "protocols": {name: PROTOCOLS[name] for name in plan.protocols},
        "presets": preset,
        "compiled_programs": sum(gathered(programs())),
        "wall_seconds": round(time.time() - started, 1),
        "peak_bytes": max(gathered(peak_bytes())),
        "examples": task_examples(plan, batches, rows),
        "failed": [[*one.cell, one.protocol, one.error] for one in failed],
        "cells": [{**dataclasses.asdict(c), **timings.get((c.method, c.budget), {})} for c in cells],
    }
    if is_first():
        _write(
            folder, rows, metrics, cells, kept_examples(plan, batches, log.done, unit_key), timings, pictures
        )
        _write_errors(folder, failed)
    print_table(cells, timings, console)
    console.print(
        f"{metrics['compiled_programs']} compiled programs, {metrics['wall_seconds']:.0f} s, peak memory "
        f"{metrics['peak_bytes'] / 2**30:.2f} GiB, preset {preset['name']}"
    )
    console.print(f"wrote {folder / 'report.html'}, frontier.png, results.jsonl, metrics.json")
    for one in failed:
        console.print(f"left out, because it failed: {one}", markup=False)
    if failed:
        console.print(f"{folder / 'errors.txt'} has the tracebacks; --resume tries these again")
    return Comparison(cells, rows, timings, metrics, folder)


def _write_errors(folder: Path, failed: Sequence[Failure]) -> None:
    """Write the tracebacks of methods that failed, or remove those of an earlier try."""
    with writing(folder):
        if failed:
            text = "\n".join(f"{one}\n\n{one.trace}" for one in failed)
            write_atomic(folder / "errors.txt", text.encode())
        else:
            (folder / "errors.txt").unlink(missing_ok=True)


def _write(
    folder: Path,
    rows: list[dict[str, Any]],
    metrics: dict[str, Any],
    cells: list[Cell],
    examples: list[dict[str, Any]],
    timings: CellTimings,
    pictures: list[Picture],
) -> None:
    with writing(folder):
        write_atomic(folder / "results.jsonl", "".join(json.dumps(r) + "\n" for r in rows).encode())
        write_atomic(folder / "metrics.json", json.dumps(metrics, indent=1).encode())
        write_frontier(folder / "frontier.png", panels_of(cells), caption=caption_of(metrics, cells))
        write_report(
            folder / "report.html",
            metrics,
            cells,
            examples,
            timings=timings,
            duels=duels_of(rows),
            pictures=pictures,
            rows=rows,
        )
