"""Trains `recall-tiny`: 0.8 M parameters that can look up, follow, collect and copy, in minutes on a CPU.

    python -m kvjax.train.recall --seed 0 --out runs/recall-0

One plain loop: AdamW (Loshchilov & Hutter, 2019, arXiv:1711.05101) on sequences of growing length, from the
initialisation of `kvjax.train.recall_init`. The data of a step is a function of (seed, step) and a checkpoint
holds everything else, so a run that was killed continues to the same weights as one that was not.

The folder of a run holds `model.npz` (float16 weights and config), `log.jsonl`, `run.json` (settings) and
`checkpoint.npz`. The forward pass here is for training; the decoder that uses the weights is in `models/`.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvjax.errors import InputError
from kvjax.eval.recall_tasks import TASKS, training_batch
from kvjax.train.recall_init import Params, RecallSize, circuit_init


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

_STRIP = 128
_REMAT_FROM = 1024


class Step(NamedTuple):
    """One optimiser step: sequence length, sequences, learning rate."""

    length: int
    batch: int
    learning_rate: float


class State(NamedTuple):
    """Everything that a step changes."""

    params: Params
    optimiser: Any


def plan(schedule: Sequence[Stage]) -> list[Step]:
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
            steps.append(Step(stage.length, batch, PEAK_LEARNING_RATE * warmup * decay))
            seen += batch * stage.length
    return steps


def _rms_norm(x: Float[Array, "B T D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "B T D"]:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight[None, None, :]


def _rope(x: Float[Array, "heads T H"], theta: float) -> Float[Array, "heads T H"]:
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = (jnp.asarray(f(angle), jnp.float32)[None] for f in (np.cos, np.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _attend_strip(
    q: Float[Array, "G T H"], k: Float[Array, "S H"], v: Float[Array, "S H"], start: int
) -> Float[Array, "G T H"]:
    """Queries at positions start .. start + T over the keys at 0 .. S - 1, causal."""
    scores = jnp.einsum("gth,sh->gts", q, k)
    visible = (start + np.arange(q.shape[1]))[:, None] >= np.arange(k.shape[0])
    scores = jnp.where(visible[None], scores, -1e30)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return jnp.einsum("gts,sh->gth", weights, v) / weights.sum(-1, keepdims=True)


def _attend(
    qkv: tuple[Float[Array, "G T H"], Float[Array, "T H"], Float[Array, "T H"]],
) -> Float[Array, "G T H"]:
    """Causal attention of one KV head in strips of queries: no strip sees the keys after it.

    Long sequences recompute the probabilities in the backward pass instead of keeping them.
    """
    q, k, v = qkv
    remat = k.shape[0] >= _REMAT_FROM
    strip = jax.checkpoint(_attend_strip, static_argnums=3) if remat else _attend_strip
    starts = range(0, k.shape[0], _STRIP)
    outs = [strip(q[:, s : s + _STRIP], k[: s + _STRIP], v[: s + _STRIP], s) for s in starts]
    return jnp.concatenate(outs, 1)


def _attention(y: Float[Array, "B T D"], layer: Params, size: RecallSize) -> Float[Array, "B T D"]:
    b, t, _ = y.shape
    n, k, h = size.heads, size.kv_heads, size.head_dim

    def heads(matrix: str, count: int) -> Float[Array, "heads T H"]:
        return (y @ layer[matrix]).reshape(b, t, count, h).transpose(0, 2, 1, 3).reshape(b * count, t, h)

    query = (_rope(heads("q", n), size.theta) * h**-0.5).reshape(b * k, n // k, t, h)
    # One KV head at a time: its scores stay in the processor's cache, which is worth a fifth of the step.
    out = jax.lax.map(_attend, (query, _rope(heads("k", k), size.theta), heads("v", k)))
    return out.reshape(b, n, t, h).transpose(0, 2, 1, 3).reshape(b, t, n * h) @ layer["o"]


def _forward(params: Params, tokens: Int[Array, "B T"], size: RecallSize) -> Float[Array, "B T V"]:
    x = params["embed"][tokens]
    for layer in params["layers"]:
        x = x + _attention(_rms_norm(x, layer["attn_norm"], size.eps), layer, size)
        y = _rms_norm(x, layer["mlp_norm"], size.eps)
        x = x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
    return _rms_norm(x, params["norm"], size.eps) @ params["embed"].T


def _loss(
    params: Params,
    tokens: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    kinds: Int[Array, "B T"],
    size: RecallSize,
) -> tuple[Float[Array, ""], Float[Array, "tasks 2"]]:
    """Weighted mean of the next-token loss in nats; per kind, the number of right tokens and of all."""
    logits = _forward(params, tokens[:, :-1], size)
    target = tokens[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    loss = jnp.sum(losses * weights[:, 1:]) / jnp.sum(weights[:, 1:])
    kind = jax.nn.one_hot(kinds[:, 1:], len(TASKS) + 1)
    right = (jnp.argmax(logits, -1) == target).astype(jnp.float32)
    counts = jnp.stack([jnp.einsum("btk,bt->k", kind, right), kind.sum((0, 1))], -1)
    return loss, counts


def _optimiser() -> optax.GradientTransformation:
    """AdamW without its learning rate, which a step applies itself: it follows tokens, not steps."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.98, eps=1e-9),
        optax.add_decayed_weights(0.05, mask=partial(jax.tree.map, lambda x: x.ndim > 1)),
    )


@partial(jax.jit, static_argnames="size", donate_argnums=0)
def _update(
    state: State,
    batch: tuple[Int[Array, "B T"], Float[Array, "B T"], Int[Array, "B T"]],
    learning_rate: Float[Array, ""],
    size: RecallSize,
) -> tuple[State, Float[Array, ""], Float[Array, "tasks 2"]]:
    (loss, counts), gradient = jax.value_and_grad(_loss, has_aux=True)(state.params, *batch, size)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of an integer step
        direction, optimiser = _optimiser().update(gradient, state.optimiser, state.params)
    params = jax.tree.map(lambda p, d: p - learning_rate * d, state.params, direction)
    return State(params, optimiser), loss, counts


@contextmanager
def _replacing(path: Path):
    """A temporary path that takes the name of `path` once complete: a kill leaves the old file whole."""
    temporary = path.with_name(f"{path.name}.tmp")
    yield temporary
    os.replace(temporary, path)


def save_weights(path: str | Path, params: Params, size: RecallSize) -> None:
    """Write float16 weights and a JSON config to one .npz; matrices are [out, in], q|k|v and gate|up fused.

    Keys: `__config__`, `emb`, `nf`, `blocks.{i}.{n1, n2, wqkv, wo, w13, w2}`.
    """
    arrays = {"emb": params["embed"], "nf": params["norm"]}
    for i, layer in enumerate(params["layers"]):
        fused = {
            "n1": layer["attn_norm"],
            "n2": layer["mlp_norm"],
            "wqkv": np.concatenate([layer["q"], layer["k"], layer["v"]], 1).T,
            "wo": np.asarray(layer["o"]).T,
            "w13": np.concatenate([layer["gate"], layer["up"]], 1).T,
            "w2": np.asarray(layer["down"]).T,
        }
        arrays |= {f"blocks.{i}.{name}": x for name, x in fused.items()}
    config = {
        "vocab": size.vocab,
        "d": size.width,
        "layers": size.layers,
        "heads": size.heads,
        "kv_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "ffn": size.ffn,
        "theta": size.theta,
        "qk_norm": False,
    }
    halves: dict[str, Any] = {name: np.asarray(x, np.float16) for name, x in arrays.items()}
    with _replacing(Path(path)) as temporary, open(temporary, "wb") as file:
        np.savez(file, __config__=json.dumps(config), **halves)


def _save_checkpoint(path: Path, state: State, step: int, seconds: Mapping[str, float]) -> None:
    leaves: dict[str, Any] = {f"leaf{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(state))}
    with _replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, step=step, seconds=json.dumps(seconds), **leaves)


def _load_checkpoint(path: Path, like: State) -> tuple[State, int, dict[str, float]]:
    with np.load(path) as saved:
        leaves, tree = jax.tree.flatten(like)
        leaves = [jnp.asarray(saved[f"leaf{i}"]) for i in range(len(leaves))]
        return jax.tree.unflatten(tree, leaves), int(saved["step"]), json.loads(str(saved["seconds"]))


def _trim_log(path: Path, step: int) -> None:
    """Drop what was logged after `step`, half-written lines included: those steps are run again."""
    kept = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except json.JSONDecodeError:
            break
    with _replacing(path) as temporary:
        temporary.write_text("".join(kept))


def _open_run(folder: Path, settings: dict[str, Any], resume: bool) -> None:
    """Create the folder of a run, or check that the run in it is the one asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    asked, written = json.loads(json.dumps(settings)), folder / "run.json"
    if resume and written.exists():
        found = json.loads(written.read_text())
        differing = [name for name in asked if found.get(name) != asked[name]]
        if differing:
            had = ", ".join(f"{name} {found.get(name)} (asked: {asked[name]})" for name in differing)
            raise InputError(
                f"{folder} holds a run with other settings: {had}. Choose another folder to keep it, "
                f"or start afresh in this one with resume=False (--no-resume)"
            )
    else:
        for stale in ("checkpoint.npz", "log.jsonl", "model.npz"):
            (folder / stale).unlink(missing_ok=True)
    with _replacing(written) as temporary:
        temporary.write_text(json.dumps(asked, indent=1) + "\n")


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


def _clock(before: Mapping[str, float]) -> Callable[[], dict[str, float]]:
    """Reads the wall and CPU seconds of a run over all its restarts."""
    clocks = {"seconds": time.monotonic, "cpu_seconds": time.process_time}
    started = {name: clock() for name, clock in clocks.items()}
    return lambda: {name: before.get(name, 0.0) + clocks[name]() - started[name] for name in clocks}


def _start(folder: Path, seed: int, size: RecallSize, resume: bool) -> tuple[State, int, dict[str, float]]:
    params = circuit_init(jax.random.key(seed), size)
    state = State(params, _optimiser().init(params))
    path = folder / "checkpoint.npz"
    return _load_checkpoint(path, state) if resume and path.exists() else (state, 0, {})


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"))
    return Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[news]}"))


def train(
    out: str | Path,
    *,
    seed: int,
    schedule: Sequence[Stage] = SCHEDULE,
    size: RecallSize | None = None,
    resume: bool = True,
    checkpoint_seconds: float = 60.0,
) -> Path:
    """Train a recall model into the folder `out` and return the path of its weights, `out/model.npz`.

    Everything follows from (seed, schedule, size). With `resume`, a run that was cut continues from its last
    checkpoint, about `checkpoint_seconds` back, to the same weights; a finished run returns at once. Raises
    InputError where `out` holds a run with other settings.

    >>> train("runs/recall-0", seed=0)  # doctest: +SKIP
    PosixPath('runs/recall-0/model.npz')
    """
    folder, size, steps = Path(out), size or RecallSize(), plan(schedule)
    stages = [list(stage) for stage in schedule]
    _open_run(folder, {"seed": seed, "schedule": stages, "size": asdict(size)}, resume)
    state, done, before = _start(folder, seed, size, resume)
    _trim_log(folder / "log.jsonl", done)
    clock, saved = _clock(before), time.monotonic()
    # Attention makes a token of a long sequence dearer: in these units the time left is nearly right.
    cost = [step.batch * step.length * (1 + step.length / 1200) for step in steps]
    tokens = sum(step.batch * step.length for step in steps[:done])
    with _progress() as progress, open(folder / "log.jsonl", "a") as log:
        bar = progress.add_task(f"recall seed {seed}", total=sum(cost), news="")
        progress.advance(bar, sum(cost[:done]))
        for i in range(done, len(steps)):
            step = steps[i]
            batch = training_batch(np.random.default_rng([seed, i]), step.batch, step.length)
            state, loss, counts = _update(state, batch, np.float32(step.learning_rate), size)
            tokens += step.batch * step.length
            progress.advance(bar, cost[i])
            if (i + 1) % LOG_EVERY == 0 or i + 1 == len(steps):
                record = _record(i + 1, tokens, step.length, loss, counts, clock())
                log.write(json.dumps(record) + "\n")
                log.flush()
                progress.update(bar, news=f"loss {record['loss']:.3f}  get {record.get('get', 0):.3f}")
            if time.monotonic() - saved >= checkpoint_seconds:
                _save_checkpoint(folder / "checkpoint.npz", state, i + 1, clock())
                saved = time.monotonic()
    if done < len(steps):
        _save_checkpoint(folder / "checkpoint.npz", state, len(steps), clock())
    save_weights(folder / "model.npz", state.params, size)
    return folder / "model.npz"


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
        print(train(args.out, seed=args.seed, schedule=args.schedule, resume=not args.no_resume))
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
