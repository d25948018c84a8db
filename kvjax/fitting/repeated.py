"""Memory from which its run can be said again: the repetition zone of LoMA."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import steps
from kvjax.cache import Cache, GroupState
from kvjax.choose import Fresh
from kvjax.eval.tasks.sample import Sample
from kvjax.fitted import Fitted
from kvjax.fitting.asked import Asked, asked, mean_said, said_behind
from kvjax.fitting.descent import Arrays, descended
from kvjax.fitting.remembered import run_of, start_of
from kvjax.fitting.whole import check_whole
from kvjax.grammar import Method
from kvjax.keep.memory_tokens import RunMemory
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.protocols import View
from kvjax.segments import whole_slots
from kvjax.steps import Prompt, Run
from kvjax.steps.marking import Marks

MARK = True
WEIGHT = 1.0


def fit_repetition(
    model: Model,
    batches: list[list[Sample]],
    *,
    method: Method,
    rank: int = 16,
    rate: float = 3e-3,
    epochs: int = 16,
    seed: int = 0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    check_whole(model, "memory tokens")
    embed = model.params["embed"]
    cue = jax.random.normal(jax.random.key(seed + 2), (1, model.config.d_model)) * jnp.std(embed)
    start = start_of(model, method, rank, seed) | {"repeat": cue}
    first = Fitted({n: np.asarray(x) for n, x in start.items()}, "RunMemory", model.signature)
    run = run_of(model, method, first)

    def loss(arrays: Arrays, batch: Asked, params: Params) -> Float[Array, ""]:
        return sum(losses(run, params | {"fitted": {first.digest: arrays}}, batch))

    read = asked(model, batches, epochs, seed, progress)
    found = descended(loss, start, read, model.params, rate=rate)
    return Fitted(found, "RunMemory", model.signature)


def losses(run: Run, params: Params, batch: Asked) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The means of -log p of answers' tokens behind the memory of contexts, and of runs' tokens behind theirs."""
    needs = steps.needs_of(run, params)
    prompt = steps.observe(run, params, batch.context, batch.lengths, None, needs)
    sizes: dict[str, Any] = dict(tokens=batch.context.shape[1], room=batch.tail.shape[1])
    cache = steps.settle(run, params, prompt, None, compress=True, **sizes)
    said = said_behind(run.config, params, cache, batch)
    answers = mean_said(-jnp.take_along_axis(said, batch.answer[..., None], axis=-1)[..., 0], batch)
    return answers, repeated(run, params, prompt, batch.context, batch.lengths)


def repeated(
    run: Run, params: Params, prompt: Prompt, context: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> Float[Array, ""]:
    """The mean of -log p of the tokens of every run, said one behind the other from its memory alone."""
    word: RunMemory = run.method.reread
    assert word.fitted is not None
    (rows, t), text, many = context.shape, jnp.maximum(lengths - 1, 0), word.tokens
    size, runs = word.chunk(t), word.chunks(t)
    each = jnp.arange(runs, dtype=jnp.int32)[None]
    count = jnp.clip(text[:, None] - each * size, 0, size)
    at = jnp.arange(many, dtype=jnp.int32)
    stands = jax.vmap(lambda i: word.stands(i, count[:, i]), out_axes=1)(each[0])
    stand = jnp.where(at < word.of(count)[..., None], stands, -1)
    following = (each * size + count).reshape(-1)

    def apart(x: Array) -> Array:
        x = x[:, :, :, : runs * many].reshape(*x.shape[:3], runs, many, x.shape[-1])
        return jnp.moveaxis(x, 3, 2).reshape(x.shape[0], rows * runs, x.shape[2], many, -1)

    groups = []
    for gm, fresh in zip(run.groups(params), prompt.fresh, strict=True):
        assert isinstance(fresh, Fresh) and fresh.k is not None and fresh.v is not None
        k, v = apart(fresh.k), apart(fresh.v)
        pos = jnp.broadcast_to(stand.reshape(1, rows * runs, 1, many), k.shape[:4])
        groups.append(GroupState(tail=whole_slots(gm, View(k, v, pos, None, {}))))
    cue = params["fitted"][word.fitted.digest]["repeat"].astype(params["embed"].dtype)
    cues, counts = jnp.broadcast_to(cue, (rows * runs, size, cue.shape[-1])), count.reshape(-1)
    marks = Marks(jnp.ones(cues.shape[:2]), word.fitted.digest) if MARK else None
    plain = Run(run.config, Method())
    read = steps.read_tokens(
        plain, params, cues, counts, Cache(tuple(groups), following), frozenset(), as_steps=True, marks=marks
    )
    said = jax.nn.log_softmax(read.logits.astype(jnp.float32))
    ids = jnp.pad(context, ((0, 0), (0, max(0, runs * size - t))))[:, : runs * size].reshape(-1, size)
    own = jnp.arange(size)[None] < counts[:, None]
    off = -jnp.take_along_axis(said, ids[..., None], axis=-1)[..., 0]
    return jnp.where(own, off, 0.0).sum() / jnp.maximum(own.sum(), 1).astype(jnp.float32)
