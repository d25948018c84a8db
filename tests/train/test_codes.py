"""Transformer-VQ's codes in training: their distance from keys, and that a step moves both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.config import Config
from kvjax.models.mixers.transformer_vq import VectorQuantised
from kvjax.models.params import init
from kvjax.train.optimiser import optimiser
from kvjax.train.settings import Loop, Optimiser
from kvjax.train.step import BatchParts, TrainState, learned_loss, make_step, total_loss

WORD = VectorQuantised(2, 6, 5, codes=7, block=4)
CONFIG = Config(vocab=16, d_model=12, layers=2, heads=2, kv_heads=2, head_dim=6, d_ff=16, mixers=(WORD,) * 2)
LOOP = Loop(steps=30, batch=2, length=16, compute="float32", codes=0.5)


def layer():
    params = init(CONFIG, jax.random.key(0))
    return params, {name: w[0] for name, w in params["layers"][0].items()}


@pytest.mark.rotating
def test_distance_is_that_of_the_nearest_code_at_one_length():
    _, p = layer()
    x = jax.random.normal(jax.random.key(1), (2, 9, 12))
    k = (np.asarray(x, np.float64) @ np.asarray(p["k"], np.float64)).reshape(2, 9, 2, 6)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    book = np.asarray(p["codebook"], np.float64)
    book /= np.linalg.norm(book, axis=1, keepdims=True)
    squares = np.square(k[..., None] - book).sum(-2)
    assert float(WORD.apart(p, x)) == pytest.approx(squares.min(-1).mean(), rel=1e-4)


@pytest.mark.rotating
def test_codes_learn_from_their_distance_alone_and_keys_from_both():
    _, p = layer()
    x = jax.random.normal(jax.random.key(1), (2, 9, 12))
    gradient = jax.grad(lambda p: WORD.apart(p, x))(p)
    moved = {name for name, g in gradient.items() if np.abs(g).max() > 0}
    assert moved == {"k", "codebook"}


@pytest.mark.rotating
def test_training_draws_keys_and_codes_together():
    params, _ = layer()
    tokens = np.random.default_rng(0).integers(0, 16, (2, 17)).astype(np.int32)
    part = BatchParts(jnp.asarray(tokens), jnp.ones((2, 17), jnp.float32), None)
    both = float(learned_loss(params, part, CONFIG, LOOP) - total_loss(params, part, CONFIG, LOOP))
    steps = optimiser(Optimiser(peak=1e-2, warmup=1, weight_decay=0.0), LOOP)
    state = TrainState(jax.tree.map(jnp.copy, params), steps.init(params), jnp.zeros((), jnp.int32))
    step = make_step(CONFIG, LOOP, steps)
    for _ in range(30):
        state, _found = step(state, jax.tree.map(lambda x: x[None], part))
    after = float(
        learned_loss(state.params, part, CONFIG, LOOP) - total_loss(state.params, part, CONFIG, LOOP)
    )
    assert 0 < after < 0.7 * both
