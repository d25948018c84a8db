"""One conversation per architecture, run once and used by many tests."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import steps
from kvjax.api.prefill import bare_cache, prefill
from kvjax.grammar import Method
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import Group, plan, shapes
from kvjax.models.transformer import forward
from kvjax.state.cache import Cache
from kvjax.steps import Run
from tests.models.architectures import TABLE

VOCAB, LONGEST, ROOM = 40, 28, 48
# The texts of which rows read the first tokens.
TEXTS = np.random.default_rng(0).integers(0, VOCAB, (4, LONGEST)).astype(np.int32)


class Batch(NamedTuple):
    """texts[b]: which text row b reads; lengths[b]: how much of it is the prompt."""

    texts: tuple[int, ...]
    lengths: tuple[int, ...]


# Text 1 stands among other companions in the second batch, at the same length.
BATCHES = {"main": Batch((0, 1, 2), (13, 6, 1)), "other": Batch((3, 1, 0), (9, 6, 12))}
# Which rows take a new token at each step; the others are asked their last one again.
STEPS = np.array([[1, 1, 1], [1, 1, 1], [1, 0, 1], [1, 1, 1]], bool)
RESTING = 2  # the step at which row 1 rests


def parameter(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """One layer's weights as `init` draws them, but biases and norms such that every number matters."""
    if name == "a_log":
        start = np.log(rng.uniform(1, 16, shape))
    elif name == "dt_bias":
        start = np.log(np.expm1(rng.uniform(0.001, 0.1, shape)))
    elif name.endswith("norm"):
        start = np.ones(shape)
    elif len(shape) < 2:
        start = np.zeros(shape)
    else:
        start = rng.standard_normal(shape) * shape[1 if name == "embed" else -2] ** -0.5
    return (start + 0.1 * rng.standard_normal(shape)).astype(np.float32)


def parameters(config: Config, seed: int = 1) -> Any:
    """Random parameters of layers one by one, drawn without compiling anything."""
    tree, rng = shapes(config, plan(config, stacked=False)), np.random.default_rng(seed)
    layers = tuple({n: parameter(rng, n, s[1:])[None] for n, s in p.items()} for p in tree.pop("layers"))
    rest = {name: parameter(rng, name, shape) for name, shape in tree.items()}
    return jax.tree.map(jnp.asarray, {**rest, "layers": layers})


@cache
def model(name: str) -> Model:
    config = TABLE[name].config
    return Model(config, parameters(config), name=name)


class Whole(NamedTuple):
    """Every text without a cache: logits [4, LONGEST, V], a loss of them, and its gradient."""

    logits: np.ndarray
    loss: float
    gradient: Any


@cache
def loss_of(name: str) -> Any:
    """Make the program from parameters to ((loss, logits), gradient)."""
    config = TABLE[name].config

    def loss(params):
        logits = forward(params, jnp.asarray(TEXTS), config)
        return jax.nn.log_softmax(logits)[..., 0].mean(), logits

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@cache
def whole(name: str) -> Whole:
    (loss, logits), gradient = loss_of(name)(model(name).params)
    return Whole(np.asarray(logits), float(loss), jax.tree.map(np.asarray, gradient))


def step(m: Model, state: Cache, token: Any, append: Any) -> tuple[jax.Array, Cache]:
    """One token, appended in some rows, without giving the cache away."""
    run = Run(m.config, Method())
    inputs = (bare_cache(state), jnp.asarray(token), jnp.asarray(append))
    logits, new = steps.step_keeping(run, m.params, *inputs)
    return logits, dataclasses.replace(new, method=state.method, model=state.model)


class Turn(NamedTuple):
    """What a batch gave: logits [B, V], how many tokens of its text each row has read, and the cache."""

    logits: jax.Array
    read: np.ndarray
    cache: Cache


class Talk(NamedTuple):
    """A prompt, its last tokens asked again, and some steps; programs: how many the steps compiled."""

    texts: np.ndarray
    prompt: Turn
    asked: Turn
    steps: list[Turn]
    programs: int


@cache
def talk(name: str, batch: str = "main") -> Talk:
    m, texts, read = model(name), np.array(BATCHES[batch].texts), np.array(BATCHES[batch].lengths)
    logits, state = prefill(m, TEXTS[texts, : max(read)], lengths=read, room=ROOM)
    prompt, before, turns = Turn(logits, read, state), steps.step_keeping._cache_size(), []
    for append in [np.zeros(3, bool), *STEPS]:
        read = read + append
        logits, state = step(m, state, TEXTS[texts, read - 1], append)
        turns.append(Turn(logits, read, state))
    return Talk(texts, prompt, turns[0], turns[1:], steps.step_keeping._cache_size() - before)


def close(got: Any, want: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-5 * np.abs(want).max(), rtol=0)


def equal(got: Any, want: Any) -> None:
    """Check that two trees are equal, bit by bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


def stacked_groups(name: str) -> tuple[Group, ...]:
    return plan(TABLE[name].config, stacked=True)
