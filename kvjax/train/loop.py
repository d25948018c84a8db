"""The training loop: batches, steps, a log, held-out losses, checkpoints, and a model at the end.

A run's folder holds run.json (settings), log.jsonl, loss.png, checkpoints/ and, at its end, model/.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from kvjax.api.block_transformer import BlockTransformer
from kvjax.base.atomic_files import write_atomic
from kvjax.base.errors import InputError
from kvjax.eval.report.progress import Bars
from kvjax.grammar.fitted import save_fitted
from kvjax.hosts.messages import by_first, check_same, count, is_first
from kvjax.io.checkpoint import save_checkpoint
from kvjax.mesh.on_mesh import OnMesh, on_mesh
from kvjax.models.axes import check_rules, note_whole
from kvjax.models.block_transformer import BlockConfig
from kvjax.models.config_json import config_to_json
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.models.params import regroup
from kvjax.models.transformer import carrying
from kvjax.train.curve import draw_losses
from kvjax.train.data.packing import HeldOut, PackedRows, Stream, StreamPosition
from kvjax.train.data.prefetch import Prefetcher
from kvjax.train.data.sources import RunTokenizer, Source, source_of, words_of
from kvjax.train.data.texts import Column, Files
from kvjax.train.devices import places, rows_placed
from kvjax.train.first_model import AnyConfig, first_model
from kvjax.train.optimiser import optimiser, rate_of
from kvjax.train.run_folder import LOG, alone, check_folder, clock, learned_file, open_run, trim_log
from kvjax.train.saving import Saver
from kvjax.train.settings import SECTIONS, Training
from kvjax.train.step import (
    BatchParts,
    Companions,
    StepResult,
    TrainedArrays,
    TrainState,
    fault,
    make_step,
    parted,
    told,
    total_loss,
)
from kvjax.train.teachers import beside, learning
from kvjax.train.trained import FrozenWeights, check_finite, groups_of, joined, kinds, split


def train(
    run: Training, out: str | os.PathLike[str], *, resume: bool = False, console: Console | None = None
) -> Path:
    """Train by the settings `run` in the folder `out`, and return the model's directory, `out/model`.

    With `resume`, an interrupted run continues from its last checkpoint to the same losses and weights as an
    uninterrupted one; without it, a folder that holds a run is an error. Raises InputError for settings that
    do not fit the texts or the model, before anything is computed, and if a loss or gradient is NaN or
    infinite, with the step and the layer; saved checkpoints remain.

    >>> from kvjax.train.settings import training
    >>> train(training({"data": {"kind": "python"}}), "runs/bytes")  # doctest: +SKIP
    PosixPath('runs/bytes/model')
    """
    by_first(partial(check_folder, folder := Path(out), resume))
    words = words_of(run.data)
    console = (console if is_first() else None) or Console(quiet=True)
    on = on_mesh(run.devices.mesh, run.devices.rules)
    config, start = first_model(run, words)
    _check(run, config, on)
    first = start()
    if run.start is not None:
        check_finite(first, f"the model {run.start} to start from")
    others = beside(run, config, first, words)
    segments = run.data.segments and not run.loop.context and not _carrying(config)
    source, held = source_of(run.data, words, run.loop, segments=segments, workers=run.devices.workers)
    if left_out := _left_out(source):
        console.print(left_out, soft_wrap=True)
    closing = contextlib.closing(source) if isinstance(source, Prefetcher) else contextlib.nullcontext()
    with closing, alone(folder, resume):
        _open(folder, run, config, resume)
        steps = optimiser(run.optimiser, run.loop)
        state, fixed = begin(first, run, config, steps, on, learning(run, others))
        saver, before = Saver(folder), {}
        check_same("the newest checkpoints", saver.latest)
        if resume and saver.latest is not None:
            state, rest = saver.load(state)
            source.place, before = StreamPosition.from_json(rest["place"]), rest["seconds"]
        if count() > 1:
            check_same("the rows to train on", _digest(source, held))
        if is_first():
            trim_log(folder, int(state.step))
        session = _Session(run, config, folder, saver, held, clock(before), console, fixed, on, others)
        step = make_step(config, run.loop, steps, on)
        learn = partial(step, beside=others, fixed=fixed)
        state = session.go(state, source.next, lambda: source.place.as_json(), learn)
        trained, others = parted(state.params, others)
        if run.tune.encoder:
            assert others.encoder is not None
            _save(folder / "encoder", others.encoder.config, others.encoder.params, words)
        model, by = _save(folder / "model", config, joined(trained, fixed), words), others.compressor
        if by is not None and by.learns is not None:
            save_fitted(learned_file(folder, by.method.id), by.fitted(model))
    return folder / "model"


def _left_out(source: Source) -> str:
    """How many texts are empty, in words; "" if none is."""
    texts = source.texts if isinstance(source, Stream) else None
    if not isinstance(texts, Column | Files) or not texts.empty:
        return ""
    return f"{texts.empty} of {texts.empty + len(texts)} texts are empty, and left out"


def _save(path: Path, config: AnyConfig, params: Params, words: RunTokenizer) -> Any:
    check_finite(params, f"{path}, which was not written,")
    of: Any = BlockTransformer if isinstance(config, BlockConfig) else Model
    model = of(
        config, params, tokenizer=words.tokenizer, special_tokens=words.special, stop_ids=(words.end,),
        name=path.parent.name,
    )  # fmt: skip
    save_checkpoint(model, path, overwrite=True)
    return model


def _carrying(config: AnyConfig) -> bool:
    """Whether a model cannot separate the texts of one row: its blocks or its states cross their borders."""
    return isinstance(config, BlockConfig) or bool(carrying(config))


def _check(run: Training, config: AnyConfig, on: OnMesh | None) -> None:
    if isinstance(config, BlockConfig):
        loop = run.loop
        layers = loop.distil_hidden or loop.distil_attention
        if not run.tune.all or on is not None or layers or loop.context or loop.method:
            raise InputError(
                "a model of two decoders trains whole and on one device, reads no context and learns no more "
                "than predictions from a teacher: leave out tune, devices, train.context, train.method, "
                "train.distil_hidden and train.distil_attention"
            )
        return
    kinds(config, run.tune)
    if on is None:
        if count() > 1:
            raise InputError(
                f"{count()} hosts were started, and devices.mesh is not given: give one over all of their "
                f"devices, such as devices.mesh=data={jax.device_count()} with devices.rules=fsdp"
            )
        return
    check_rules(config, on)
    note_whole(config, on)
    parts = on.devices("batch")
    for batch in {run.loop.batch, *(batch for *_, batch in run.loop.stages)}:
        if (rows := batch // run.loop.accumulate) % parts:
            raise InputError(
                f"a step reads train.batch / train.accumulate = {rows} rows at a time, which do not divide "
                f"over mesh axis {on.over('batch')}: give {-(-rows // parts) * parts} rows or a multiple"
            )


def begin(
    params: Params,
    run: Training,
    config: AnyConfig,
    steps: optax.GradientTransformation,
    on: OnMesh | None,
    other: Any = None,
) -> tuple[TrainState, FrozenWeights | None]:
    """Build the state before the first step, in float32 and sharded over the mesh, and frozen parameters.

    other: parameters that are trained with the model.
    """
    if isinstance(config, BlockConfig):
        whole = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        return TrainState(whole, steps.init(whole), jnp.zeros((), jnp.int32)), None
    of = kinds(config, run.tune)
    groups = groups_of(config, of)
    params = regroup(jax.tree.map(lambda x: x.astype(jnp.float32), params), groups)
    trained, fixed = params, None
    if not run.tune.all:
        trained, fixed = split(params, groups, of, run.tune, jax.random.key(run.loop.seed))
    if other is not None:
        trained = TrainedArrays(trained, jax.tree.map(lambda x: x.astype(jnp.float32), other))
    if on is None:
        return TrainState(trained, steps.init(trained), jnp.zeros((), jnp.int32)), fixed
    trained, fixed = (jax.device_put(x, places(x, params, config, on)) for x in (trained, fixed))
    kept = jax.eval_shape(steps.init, trained)
    kept = jax.jit(steps.init, out_shardings=places(kept, params, config, on))(trained)
    return TrainState(trained, kept, jax.device_put(jnp.zeros((), jnp.int32), on.sharding((), ()))), fixed


def _open(folder: Path, run: Training, config: AnyConfig, resume: bool) -> None:
    # The settings of devices are left out, because a run may continue on others. Names are those that a user
    # writes.
    parts = {name: dataclasses.asdict(getattr(run, name)) for name in ("data", "optimiser", "tune")}
    encoder = run.encoder if isinstance(run.encoder, str | None) else config_to_json(run.encoder)
    model = {"start": run.start, "teacher": run.teacher, "init": run.init, "encoder": encoder}
    settings = {"model": config_to_json(config) | model, "train": dataclasses.asdict(run.loop)} | parts
    defaults = {name: dataclasses.asdict(SECTIONS[name]()) for name in ("train", *parts)}
    by_first(lambda: open_run(folder, settings, resume, defaults))


def _digest(source: Source, held: HeldOut | None) -> str:
    """Hash a host's next rows, held-out rows and place in the data, to compare hosts before they train."""
    place = copy.deepcopy(source.place)
    ahead, kept = source.next(1, 64).tokens, () if held is None else held.rows.tokens
    source.place = place
    said = [place.as_json(), np.asarray(ahead).tolist(), np.asarray(kept).tolist()]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class _Session:
    """The state of a run from a start to its end or interruption."""

    run: Training
    config: AnyConfig
    folder: Path
    saver: Saver
    held: HeldOut | None
    now: Callable[[], dict[str, float]]
    console: Console
    fixed: FrozenWeights | None
    on: OnMesh | None
    beside: Companions

    def go(
        self,
        state: TrainState,
        next_rows: Callable[[int, int], PackedRows],
        place: Callable[[], dict[str, Any]],
        step: Callable[[TrainState, BatchParts], tuple[TrainState, StepResult]],
    ) -> TrainState:
        loop, done = self.run.loop, int(state.step)
        saved, began, asked = time.monotonic(), time.monotonic(), done
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"))
        with (
            Bars(
                *columns, TimeRemainingColumn(), TextColumn("{task.fields[news]}"), console=self.console
            ) as progress,
            open(self.folder / LOG if is_first() else os.devnull, "a") as log,
        ):
            bar = progress.add_task(self.folder.name, total=loop.steps, completed=done, news="")

            def read(i: int) -> BatchParts:
                length, batch = loop.size(i)
                return in_parts(next_rows(batch, length), loop.accumulate, self.on)

            try:
                ahead = read(done) if done < loop.steps else None
                for i in range(done, loop.steps):
                    parts, last = ahead, i + 1 == loop.steps
                    assert parts is not None
                    state, found = step(state, parts)
                    due = last or self._due(i, time.monotonic() - saved)
                    reached = place() if due else None
                    # The host reads the next rows while the device computes.
                    ahead = None if last else read(i + 1)
                    if not bool(found.finite):
                        raise InputError(self._broken(i, state, parts))
                    if (i + 1) % loop.log_every == 0 or last:
                        speed = (loop.tokens(i + 1) - loop.tokens(asked)) / (time.monotonic() - began)
                        record = self._record(i, found, speed)
                        if self.held is not None and ((i + 1) % loop.evaluate_every == 0 or last):
                            record |= self.evaluate(state.params)
                        log.write(json.dumps(record) + "\n")
                        log.flush()
                        progress.update(bar, news=_news(record))
                        began, asked = time.monotonic(), i + 1
                    progress.advance(bar)
                    if due:
                        self.saver.save(i + 1, state, {"place": reached, "seconds": self.now()})
                        saved = time.monotonic()
            finally:
                self.saver.close()
                if is_first():
                    # If the disk is full, the run should fail on an essential file, not on its picture.
                    with contextlib.suppress(OSError):
                        write_atomic(self.folder / "loss.png", draw_losses(self.folder / LOG))
        return state

    def _due(self, i: int, seconds: float) -> bool:
        """Whether to save after a step, so many seconds after the last time; several hosts follow the first.

        They synchronise only at log steps, because that takes longer than a small step.
        """
        due = seconds >= self.run.loop.save_seconds
        if count() == 1:
            return due
        return (i + 1) % self.run.loop.log_every == 0 and by_first(lambda: due)

    def evaluate(self, params: Any) -> dict[str, float]:
        """Compute the mean loss of the held-out rows, in nats per token and in bits per byte of text."""
        assert self.held is not None
        trained, beside = parted(params, self.beside)
        params = joined(trained, self.fixed)
        rows, size = self.held.rows, self.run.loop.batch
        loss = weight = 0.0
        for at in range(0, len(rows.tokens), size):
            some = PackedRows(*(None if x is None else x[at : at + size] for x in rows))  # pyright: ignore
            part = jax.tree.map(lambda x: x[0], in_parts(some, 1, self.on))
            found = _held_out_loss(params, part, self.config, self.run.loop, self.on, beside)
            loss, weight = loss + float(found), weight + float(told(part, self.run.loop).weights[:, 1:].sum())
        mean = loss / weight
        bits = mean / math.log(2) / self.held.bytes_per_token
        return {"held_out_loss": round(mean, 5), "bits_per_byte": round(bits, 5)}

    def _record(self, i: int, found: StepResult, speed: float) -> dict[str, Any]:
        loop, rate = self.run.loop, rate_of(self.run.optimiser, self.run.loop)
        return {
            "step": i + 1,
            "tokens": loop.tokens(i + 1),
            "loss": round(float(found.loss), 5),
            "norm": round(float(found.norm), 4),
            "rate": float(np.asarray(rate(i))),
            "tokens_per_second": round(speed),
            **{name: round(x, 1) for name, x in self.now().items()},
        }

    def _broken(self, i: int, state: TrainState, parts: BatchParts) -> str:
        trained, beside = parted(state.params, self.beside)
        what = fault(joined(trained, self.fixed), parts, self.config, self.run.loop, beside)
        return (
            f"step {i + 1}: {what} is not a number, so training stopped and {self.saver.kept}: lower "
            "optimiser.peak, raise optimiser.warmup, or compute in float32"
        )


_held_out_loss = jax.jit(total_loss, static_argnames=("config", "loop", "on"))


def in_parts(rows: PackedRows, parts: int, on: OnMesh | None = None) -> BatchParts:
    """Rows [B, ...] as [A, B / A, ...], on their devices."""

    def cut(x: np.ndarray) -> Array:
        return rows_placed(np.reshape(x, (parts, len(x) // parts, *x.shape[1:])), on)

    segments = None if rows.segments is None else cut(rows.segments)
    return BatchParts(cut(rows.tokens), cut(rows.weights), segments)


def _news(record: dict[str, Any]) -> str:
    bits = f"  held out {record['bits_per_byte']:.3f} bits/byte" if "bits_per_byte" in record else ""
    return f"loss {record['loss']:.3f}  {record['tokens_per_second']:,} tokens/s{bits}"
