"""The likelihood of a text over compressed caches: how much a method changes next-token predictions.

Windows of a text are read and compressed; the tokens after them are fed one by one, and every distribution of
the next token is compared with the full cache's. The first one comes from the uncompressed prompt and is
skipped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from rich.console import Console

from kvjax import steps as stepping
from kvjax.api.chunks import bucket
from kvjax.api.nan_checks import refuse_step
from kvjax.base.atomic_files import write_atomic
from kvjax.base.errors import InputError
from kvjax.compat.model_fit import check_budget
from kvjax.eval.report.distances import by_distance
from kvjax.eval.report.frontier import write_frontier
from kvjax.eval.report.progress import Bars
from kvjax.eval.report.text_page import text_caption, write_text_report
from kvjax.eval.report.text_table import LOST, print_stream, summarise_windows, text_duels, text_panels
from kvjax.eval.run.cellplan import PlannedCell, my_cells
from kvjax.eval.run.log import UnitLog, writing
from kvjax.eval.run.memory import fitting_rows
from kvjax.eval.run.runner import Runner, bare_method, bare_run
from kvjax.eval.tasks.reader import reader_of
from kvjax.eval.tasks.rows import QuestionRows
from kvjax.eval.tasks.sample import LENGTH
from kvjax.eval.tasks.suite import RecallSuite
from kvjax.grammar import Method
from kvjax.grammar.when import PREFILL_END
from kvjax.hosts.arrays import fetch
from kvjax.hosts.messages import is_first
from kvjax.methods.user import sources
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.state.cache import Cache
from kvjax.steps import PrefillOutputs, Run

STEPS = 128
BATCH_ROWS = 16
# The full cache's distributions of a batch are held for all methods.
DISTRIBUTION_BYTES = 2**28
# The rest of a file is not read: windows are drawn from this part, because tokenising takes memory.
MOST_CHARACTERS = 2**22


# --- next tokens -----------------------------------------------------------------------------------------


class Watched(NamedTuple):
    """Per fed token: -log p of its successor, here and with the full cache; KL(full || here); same top."""

    nll: Float[Array, "B F"]
    full_nll: Float[Array, "B F"]
    kl: Float[Array, "B F"]
    top1: Float[Array, "B F"]


@partial(jax.jit, static_argnames=("run",))
def expect(run: Run, params: Params, cache: Cache, tokens: Int[Array, "B F"]) -> Float[Array, "F B V"]:
    """Log-probabilities of the next token after every token, fed one by one as in decoding."""

    def one(cache: Cache, token: Array) -> tuple[Cache, Array]:
        logits, cache = stepping.step_fn(run, params, cache, token, jnp.ones(token.shape, bool))
        return cache, jax.nn.log_softmax(logits.astype(jnp.float32))

    return jax.lax.scan(one, cache, tokens.T)[1]


@partial(jax.jit, static_argnames=("run",))
def follow(
    run: Run,
    params: Params,
    cache: Cache,
    tokens: Int[Array, "B F"],
    targets: Int[Array, "B F"],
    full: Float[Array, "F B V"],
) -> Watched:
    """Feed tokens one by one and compare the prediction after each with `full` (from `expect`)."""

    def one(cache: Cache, given: tuple[Array, Array, Array]) -> tuple[Cache, Watched]:
        token, target, full = given
        logits, cache = stepping.step_fn(run, params, cache, token, jnp.ones(token.shape, bool))
        here = jax.nn.log_softmax(logits.astype(jnp.float32))
        nll, full_nll = (-jnp.take_along_axis(x, target[:, None], -1)[:, 0] for x in (here, full))
        same = (here.argmax(-1) == full.argmax(-1)).astype(jnp.float32)
        return cache, Watched(nll, full_nll, divergence(full, here), same)

    _, watched = jax.lax.scan(one, cache, (tokens.T, targets.T, full))
    return Watched(*(x.T for x in watched))


def divergence(p: Float[Array, "*b V"], q: Float[Array, "*b V"]) -> Float[Array, "*b"]:
    """KL(p || q) of log-probabilities, exact to rounding also where they are nearly equal.

    sum p (e^d - 1 - d) with d = log q - log p. The added sum q - sum p is 0; with it every term is >= 0, so
    that terms do not cancel.

    >>> p = jnp.log(jnp.array([0.5, 0.5]))
    >>> float(divergence(p, p)), round(float(divergence(p, jnp.log(jnp.array([0.25, 0.75])))), 4)
    (0.0, 0.1438)
    """
    d = q - p
    near = jnp.abs(d) < 1
    small = jnp.where(near, d, 0.0)
    terms = jnp.where(near, jnp.exp(p) * (jnp.expm1(small) - small), jnp.exp(q) - jnp.exp(p) * (1 + d))
    return terms.sum(-1)


# --- windows of a text -----------------------------------------------------------------------------------


class TextWindows(NamedTuple):
    """Disjoint pieces [W, length + steps + 1] of a text, opened as the tokenizer does; where each begins."""

    tokens: Int[np.ndarray, "W S"]
    starts: Int[np.ndarray, "W"]


def read_windows(
    model: Model, path: str | Path, *, length: int, steps: int, windows: int, seed: int
) -> TextWindows:
    """`windows` random windows of a text file, fewer where it is short.

    Raises InputError for an unreadable file, one without a single window, a model without a tokenizer, words
    that it does not know, and windows beyond the model's positions.
    """
    span, last = length + steps + 1, model.config.max_positions
    if span > last:
        raise InputError(
            f"--length {length} and {steps} tokens after it reach beyond the model's {last} positions: "
            f"expected at most {last - steps - 1}"
        )
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(MOST_CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}): expected a text file in UTF-8") from error
    reader = reader_of(model)
    ids = np.array(reader.split(text)[0], np.int32)
    own = span - len(reader.bos)
    there = len(ids) // own
    if not there:
        raise InputError(
            f"{path} holds {len(ids)} tokens, expected at least {own}: --length {length} and {steps} tokens "
            "after it; give a longer text or a smaller --length"
        )
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.choice(there, min(windows, there), replace=False))
    starts = chosen * own + rng.integers(len(ids) - there * own + 1)
    pieces = ids[starts[:, None] + np.arange(own)]
    opening = np.broadcast_to(np.array(reader.bos, np.int32), (len(starts), len(reader.bos)))
    return TextWindows(np.concatenate([opening, pieces], 1), starts)


# --- every method on every window ------------------------------------------------------------------------


def stream_text(
    model: Model,
    entries: Sequence[PlannedCell],
    text_path: str | Path,
    *,
    length: int = LENGTH,
    windows: int = 32,
    steps: int = STEPS,
    chunk: int | None = None,
    seed: int = 0,
    log: UnitLog | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Measure how well every method predicts a text after `length` tokens that it compressed.

    Args:
        model: a model.
        entries: the methods, with their budgets.
        text_path: a text file.
        length: tokens that are compressed, of each window.
        windows: disjoint windows drawn from the text.
        steps: tokens that are predicted in each window after those.
        chunk: methods that evict at the end of a prefill do so again after every `chunk` of these tokens; by
            default they keep them all. Methods that evict at every step always do.
        seed: of the windows.
        log: finished units are taken from it and added to it, so that a killed run can continue.
        console: where progress is shown.

    Returns:
        A row per entry with method, budget, nll, full_nll, delta_nll and its 95% interval over windows
        (delta_low, delta_high), kl (full || method), top1 (share of tokens whose likeliest successor is the
        full cache's), kept_bytes, full_bytes, read_bytes, tokens and windows; distances has delta_nll, kl and
        top1 with their intervals by how far after the compression a token is predicted (1 to 16 tokens, 17 to
        32, 33 to 64 ...).

    Raises:
        InputError: for whatever `read_windows` refuses.

    >>> from kvjax.eval.run.cellplan import plan_cells
    >>> from kvjax.io.load import load
    >>> model = load("recall-tiny")
    >>> stream_text(model, plan_cells(model, ["snapkv"], [0.5], "short"), "book.txt")  # doctest: +SKIP
    """
    if chunk is not None and chunk < 1:
        raise InputError(f"chunk must be a number of tokens >= 1, got {chunk}")
    entries = list(entries)
    _check_budgets(entries, length)
    found = read_windows(model, text_path, length=length, steps=steps, windows=windows, seed=seed)
    mine = entries if log is None else my_cells(model, entries)
    runner = Runner(model, RecallSuite((), length, seed), mine, bucket(length), steps, scan=True)
    done: dict[str, Any] = {} if log is None else log.done
    batches = list(_batches(model, found, length, steps))
    with Bars(console=console, transient=True) as progress:
        bar = progress.add_task("reading the text", total=len(batches) * len(mine))
        for number, (batch, count) in enumerate(batches):
            todo = [e for e in mine if _key(number, e) not in done]
            progress.advance(bar, len(mine) - len(todo))
            for entry, unit in _units(runner, batch, count, todo, length, chunk) if todo else ():
                progress.update(bar, description=f"{entry.label} {entry.budget or ''}", advance=1)
                if log is None:
                    done[_key(number, entry)] = unit
                else:
                    log.add(_key(number, entry), unit)
    if log is not None:
        log.join()
        done = log.done
    numbers = range(len(batches))
    return [summarise_windows([row for n in numbers for row in done[_key(n, e)]["rows"]]) for e in entries]


def _check_budgets(entries: Sequence[PlannedCell], length: int) -> None:
    for entry in entries:
        check_budget(bare_method(entry.method), [length])


def _key(number: int, entry: PlannedCell) -> str:
    return f"text/{number}/{entry.label}/{entry.budget!r}"


def _batches(
    model: Model, windows: TextWindows, length: int, steps: int
) -> Iterator[tuple[TextWindows, int]]:
    """As many windows at a time as fit in memory, and how many of them count: the last batch is padded."""
    itemsize = jax.tree.leaves(model.params)[0].dtype.itemsize
    rows = fitting_rows(model.config, bucket(length) + steps, itemsize, BATCH_ROWS)
    rows = max(1, min(rows, DISTRIBUTION_BYTES // (4 * steps * model.config.vocab)))
    count = len(windows.starts)
    rows = -(-count // -(-count // rows))
    for start in range(0, count, rows):
        yield (
            TextWindows(*(x[np.arange(start, start + rows) % count] for x in windows)),
            min(rows, count - start),
        )


def _units(
    runner: Runner, batch: TextWindows, count: int, todo: list[PlannedCell], length: int, chunk: int | None
) -> Iterator[tuple[PlannedCell, dict[str, Any]]]:
    """Measure entries on the first `count` windows of a batch; all share one computed prompt."""
    rows = len(batch.starts)
    tokens = np.zeros((rows, runner.tokens), np.int32)
    tokens[:, :length] = batch.tokens[:, :length]
    nothing = np.zeros((rows, 0), np.int32), np.zeros(rows, np.int32), np.zeros(rows, bool)
    given = QuestionRows(tokens, np.full(rows, length, np.int32), *nothing, [])
    prompt, _ = runner.prompt(given)
    fed = jnp.asarray(batch.tokens[:, length:])
    whole = PlannedCell("full", None, Method())
    decode = Run(runner.model.config, whole.method.decode_part(), on_mesh=runner.model.on_mesh)
    full = expect(decode, runner.params, _compressed(runner, whole, prompt), fed[:, :-1])
    full_bytes = runner.bytes_of(whole, prompt).kept

    def unit(entry: PlannedCell, alone: bool = False) -> dict[str, Any]:
        mine, _ = runner.own(entry, prompt, given)
        watched = _watch(runner, entry, mine, fed, full, chunk)
        watched = fetch(watched)
        if np.isnan(watched.nll).any():
            refuse_step(int(np.argwhere(np.isnan(watched.nll))[:, 1].min()), entry.label)
        values = {name: np.asarray(x, np.float64) for name, x in watched._asdict().items()}
        size = runner.bytes_of(entry, mine).of_row(full_bytes)
        common = {"method": entry.label, "budget": entry.budget, "tokens": fed.shape[1] - 1}
        common |= size
        found = [_means({name: x[i] for name, x in values.items()}) for i in range(count)]
        ids = [f"text-{start}" for start in batch.starts[:count]]
        return {"rows": [{"id": i, **common, **row} for i, row in zip(ids, found, strict=True)]}

    return runner.units(unit, todo)


def _means(values: dict[str, Float[np.ndarray, "F"]]) -> dict[str, Any]:
    """Average a window over all its predicted tokens, and by their distance from the compression."""
    means: dict[str, Any] = {name: float(x.mean()) for name, x in values.items()}
    return means | {"distances": by_distance(values)}


def _compressed(runner: Runner, entry: PlannedCell, prompt: PrefillOutputs) -> Cache:
    return runner.compressed(entry, prompt)


def _watch(
    runner: Runner, entry: PlannedCell, prompt: PrefillOutputs, fed: Array, full: Array, chunk: int | None
) -> Watched:
    """Feed the tokens after a prompt under one entry, in pieces if it compresses again after each."""
    model, keeps = runner.model, [one.keep for one in entry.method.sentences if one.keep is not None]
    again = chunk is not None and any(k.score is not None and k.when == PREFILL_END for k in keeps)
    count, size = fed.shape[1] - 1, chunk if again and chunk else fed.shape[1] - 1
    decode, params = runner.decoding(entry), runner.given(entry).params
    cache, parts = _compressed(runner, entry, prompt), []
    for at in range(0, count, size):
        piece, targets = fed[:, at : min(at + size, count)], fed[:, at + 1 : at + size + 1]
        parts.append(follow(decode, params, cache, piece, targets, full[at : at + size]))
        if at + size < count:
            _, cache = stepping.prefill(
                bare_run(model, entry.method), params, piece,
                jnp.full(piece.shape[:1], piece.shape[1], jnp.int32), cache,
                tokens_bound=bucket(runner.tokens + at + size), room=runner.room, compress=True,
            )  # fmt: skip
    return Watched(*(jnp.concatenate(x, 1) for x in zip(*parts, strict=True)))


# --- what is shown and stored ----------------------------------------------------------------------------


def compare_text(
    model: Model,
    entries: Sequence[PlannedCell],
    text_path: str | Path,
    *,
    folder: Path,
    length: int = LENGTH,
    windows: int = 32,
    seed: int = 0,
    resume: bool = False,
    about: Mapping[str, Any] | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """`stream_text` as a run that can be resumed: prints and writes the table, its rows, a figure and a page.

    results.jsonl has a line per window and entry; metrics.json holds `about` (versions, device ...), the
    settings and the rows of the table. InputError as `stream_text` and `UnitLog`.
    """
    # Both raise before a log is begun.
    _check_budgets(entries, length)
    read_windows(model, text_path, length=length, steps=STEPS, windows=1, seed=seed)
    settings = {
        "text": hashlib.sha256(Path(text_path).read_bytes()).hexdigest(),
        "model": model.name,
        "fingerprint": model.fingerprint,
        "cells": [[e.label, e.budget, repr(e.method)] for e in entries],
        "method_sources": sources(e.method for e in entries),
        "length": length,
        "steps": STEPS,
        "samples": windows,
        "seed": seed,
    }
    log = UnitLog(folder, settings, resume)
    try:
        rows = stream_text(
            model, entries, text_path, length=length, windows=windows, seed=seed, log=log, console=console
        )
    finally:
        log.close()
    lines = [row for unit in log.done.values() for row in unit["rows"]]
    metrics = {**(about or {}), "settings": settings, "seeds": [seed], "text": rows}
    if is_first():
        _write(folder, lines, metrics, rows)
    print_stream(rows, console)
    if console is not None:
        console.print(f"wrote {folder / 'report.html'}, frontier.png, results.jsonl, metrics.json")
    return rows


def _write(
    folder: Path, lines: list[dict[str, Any]], metrics: dict[str, Any], rows: list[dict[str, Any]]
) -> None:
    with writing(folder):
        write_atomic(folder / "results.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
        write_atomic(folder / "metrics.json", json.dumps(metrics, indent=1).encode())
        write_frontier(folder / "frontier.png", text_panels(rows), LOST, text_caption(metrics, rows))
        write_text_report(folder / "report.html", metrics, rows, text_duels(lines))
