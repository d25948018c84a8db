"""Trains `recall-tiny`: 0.8 M parameters that can look up, follow, collect and copy, in minutes on a CPU.

    python -m kvjax.train.recall --seed 0 --out runs/recall-0

One plain loop: AdamW (Loshchilov & Hutter, 2019, arXiv:1711.05101) on sequences of growing length, from the
initialisation of `kvjax.train.recall_init`. The data of a step is a function of (seed, step) and a checkpoint
holds everything else, so a run that was killed continues to the same weights as one that was not.

The folder of a run holds `model/` (a Hugging Face directory, float16), `accuracies.json` (what the full cache
scores in `kvjax compare`), `log.jsonl`, `run.json` (settings) and `checkpoint.npz`.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvjax.errors import InputError
from kvjax.eval.compare import compare
from kvjax.eval.tasks import recall
from kvjax.eval.tasks.recall_tasks import TASKS, training_batch
from kvjax.files import write_atomic
from kvjax.models.config import Config
from kvjax.models.hf import save_hf
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.models.transformer import forward
from kvjax.train.recall_init import CONFIG, circuit_init
from kvjax.train.run_folder import LOG, clock, load_state, open_run, save_state, trim_log


class Stage(NamedTuple):
    """A part of the schedule: million tokens to train on, sequence length, tokens per optimiser step."""

    million_tokens: float
    length: int
    tokens_per_step: int


SCHEDULE = (
    Stage(0.5, 128, 2048),
    Stage(0.6, 256, 2048),
    Stage(0.7, 512, 4096),
    Stage(0.9, 1024, 4096),
    Stage(0.9, 2048, 8192),
)
PEAK_LEARNING_RATE = 1.5e-3
WARMUP_STEPS = 100
LOG_EVERY = 25


class TrainStep(NamedTuple):
    """One optimiser step: sequence length, sequences, learning rate."""

    length: int
    batch: int
    learning_rate: float


class TrainState(NamedTuple):
    """Everything that a step changes."""

    params: Params
    optimiser: Any


def plan(schedule: Sequence[Stage]) -> list[TrainStep]:
    """Every step of a schedule: warm-up, constant to 60 % of the tokens, then linear down to 3 %.

    >>> steps = plan(SCHEDULE)
    >>> len(steps), steps[0].length, steps[-1].length
    (1039, 128, 2048)
    """
    total = sum(stage.million_tokens for stage in schedule) * 1e6
    steps, seen, end = [], 0, 0.0
    for stage in schedule:
        end += stage.million_tokens * 1e6
        batch = max(1, stage.tokens_per_step // stage.length)
        while seen < end:
            done = seen / total
            decay = 1.0 if done < 0.6 else max(0.03, 1 - (done - 0.6) / 0.4)
            warmup = min(1.0, (len(steps) + 1) / WARMUP_STEPS)
            steps.append(TrainStep(stage.length, batch, PEAK_LEARNING_RATE * warmup * decay))
            seen += batch * stage.length
    return steps


def _loss(
    params: Params,
    tokens: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    kinds: Int[Array, "B T"],
    config: Config,
) -> tuple[Float[Array, ""], Float[Array, "tasks 2"]]:
    """Weighted mean of the next-token loss in nats; per kind, the number of right tokens and of all."""
    logits = forward(params, tokens[:, :-1], config)
    target = tokens[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    loss = jnp.sum(losses * weights[:, 1:]) / jnp.sum(weights[:, 1:])
    kind = jax.nn.one_hot(kinds[:, 1:], len(TASKS) + 1)
    right = (jnp.argmax(logits, -1) == target).astype(jnp.float32)
    counts = jnp.stack([jnp.einsum("btk,bt->k", kind, right), kind.sum((0, 1))], -1)
    return loss, counts


def _optimiser() -> optax.GradientTransformation:
    """AdamW without a learning rate, which `_update` applies: it follows tokens seen, not steps."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.98, eps=1e-9),
        optax.add_decayed_weights(0.05, mask=partial(jax.tree.map, lambda x: x.ndim > 1)),
    )


@partial(jax.jit, static_argnames="config", donate_argnums=0)
def _update(
    state: TrainState,
    batch: tuple[Int[Array, "B T"], Float[Array, "B T"], Int[Array, "B T"]],
    learning_rate: Float[Array, ""],
    config: Config,
) -> tuple[TrainState, Float[Array, ""], Float[Array, "tasks 2"]]:
    (loss, counts), gradient = jax.value_and_grad(_loss, has_aux=True)(state.params, *batch, config)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of an integer step
        direction, optimiser = _optimiser().update(gradient, state.optimiser, state.params)
    params = jax.tree.map(lambda p, d: p - learning_rate * d, state.params, direction)
    return TrainState(params, optimiser), loss, counts


def _record(
    step: int, tokens: int, length: int, loss: Any, counts: Any, seconds: Mapping[str, float]
) -> dict[str, int | float]:
    """One line of the log: loss in nats, the share of right answer tokens per task, seconds so far."""
    right, total = np.asarray(counts).T
    rows = enumerate(TASKS, start=1)
    accuracy = {task: round(float(right[i] / total[i]), 4) for i, task in rows if total[i]}
    spent = {name: round(value, 1) for name, value in seconds.items()}
    where = {"step": step, "tokens": tokens, "length": length, "loss": round(float(loss), 5)}
    return where | accuracy | spent


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"))
    return Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[news]}"))


def _model(params: Params, config: Config, name: str) -> Model:
    """The model in float16, with the tokenizer of the recall language."""
    special = {"bos_token": recall.WORDS[recall.BOS], "pad_token": recall.WORDS[recall.PAD]}
    special["repeat_prompt"] = recall.WORDS[recall.COPY]
    halves = jax.tree.map(lambda x: x.astype(jnp.float16), params)
    return Model(config, halves, tokenizer=recall.tokenizer(), special_tokens=special, name=name)


def train(
    out: str | Path,
    *,
    seed: int,
    schedule: Sequence[Stage] = SCHEDULE,
    config: Config = CONFIG,
    resume: bool = True,
    checkpoint_seconds: float = 60.0,
) -> Path:
    """Train a recall model into the folder `out` and return the path of its weights, `out/model`.

    Everything follows from (seed, schedule, config). With `resume`, a run that was cut continues from its
    last checkpoint, about `checkpoint_seconds` back, to the same weights; a finished run returns at once.
    Raises InputError where `out` holds a run with other settings.

    >>> train("runs/recall-0", seed=0)  # doctest: +SKIP
    PosixPath('runs/recall-0/model')
    """
    folder, steps = Path(out), plan(schedule)
    settings = {"seed": seed, "schedule": [list(s) for s in schedule], "config": dataclasses.asdict(config)}
    open_run(folder, settings, resume)
    params = circuit_init(jax.random.key(seed), config)
    state, done, before = load_state(folder, TrainState(params, _optimiser().init(params)))
    trim_log(folder, done)
    now, saved = clock(before), time.monotonic()
    # Tokens of long sequences take longer, because of attention: this estimates the time of every step.
    cost = [step.batch * step.length * (1 + step.length / 1200) for step in steps]
    tokens = sum(step.batch * step.length for step in steps[:done])
    with _progress() as progress, open(folder / LOG, "a") as log:
        bar = progress.add_task(f"recall seed {seed}", total=sum(cost), news="")
        progress.advance(bar, sum(cost[:done]))
        for i in range(done, len(steps)):
            step = steps[i]
            batch = training_batch(np.random.default_rng([seed, i]), step.batch, step.length)
            state, loss, counts = _update(state, batch, np.float32(step.learning_rate), config)
            tokens += step.batch * step.length
            progress.advance(bar, cost[i])
            if (i + 1) % LOG_EVERY == 0 or i + 1 == len(steps):
                record = _record(i + 1, tokens, step.length, loss, counts, now())
                log.write(json.dumps(record) + "\n")
                log.flush()
                progress.update(bar, news=f"loss {record['loss']:.3f}  get {record.get('get', 0):.3f}")
            if time.monotonic() - saved >= checkpoint_seconds:
                save_state(folder, state, i + 1, now())
                saved = time.monotonic()
    if done < len(steps) or not (folder / "model").exists():
        save_state(folder, state, len(steps), now())
        save_hf(_model(state.params, config, f"recall-{seed}"), folder / "model")
    return folder / "model"


def measure(model: str | Path, *, samples: int = 64, console: Console | None = None) -> dict[str, Any]:
    """What the full cache scores per task in `kvjax compare`, at 512 tokens and for lookups at 1920.

    >>> measure("runs/recall-0/model")  # doctest: +SKIP
    {'samples': 64, 'at_512': {'get': 1.0, 'chase': 1.0, 'all': 0.97, ...}, 'at_1920': {'get': 1.0}}
    """
    import tempfile

    console = console or Console(quiet=True)
    found: dict[str, Any] = {"samples": samples}
    for length, tasks in ((512, None), (1920, ["get"])):
        with tempfile.TemporaryDirectory() as folder:
            run = compare(
                model=str(model), methods=["full"], tasks=tasks, length=length, samples=samples,
                protocols=("agnostic",), out=Path(folder) / "full", console=console,
            )  # fmt: skip
        full = next(cell for cell in run.cells if cell.method == "full")
        found[f"at_{length}"] = {task: round(score.mean, 4) for task, score in full.tasks.items()}
    return found


def _parse_schedule(text: str) -> list[Stage]:
    try:
        stages = [part.split(":") for part in text.split(",")]
        return [Stage(float(millions), int(length), int(per_step)) for millions, length, per_step in stages]
    except ValueError:
        form = "million tokens:length:tokens per step,..."
        raise argparse.ArgumentTypeError(f"expected {form} such as 0.5:128:2048, got {text!r}") from None


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of the training: see `python -m kvjax.train.recall --help`."""
    default = ",".join(f"{s.million_tokens}:{s.length}:{s.tokens_per_step}" for s in SCHEDULE)
    parser = argparse.ArgumentParser(description="Train recall-tiny, the small model that is shipped.")
    parser.add_argument("--out", required=True, help="folder of the run; an unfinished one is continued")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedule", type=_parse_schedule, default=default, help="default: %(default)s")
    parser.add_argument("--no-resume", action="store_true", help="start afresh, whatever the folder holds")
    args = parser.parse_args(argv)
    try:
        model = train(args.out, seed=args.seed, schedule=args.schedule, resume=not args.no_resume)
        if not (written := Path(args.out) / "accuracies.json").exists() or args.no_resume:
            write_atomic(written, (json.dumps(measure(model), indent=1) + "\n").encode())
    except InputError as error:
        parser.error(str(error))
    print(model, written.read_text())


if __name__ == "__main__":
    main()
