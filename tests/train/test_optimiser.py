"""Optimisers: which parameters get which kind of step, and the first step by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.config import Config
from kvjax.models.params import init
from kvjax.train.optimiser import learning_rate, optimiser
from kvjax.train.settings import Loop, Optimiser

CONFIG = Config(vocab=32, d_model=16, layers=2, heads=2, kv_heads=1, head_dim=8, d_ff=24)


def first_step(settings):
    params = init(CONFIG, jax.random.key(0))
    rng = np.random.default_rng(0)
    gradient = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), params)
    steps = optimiser(settings, Loop(steps=10))
    with jax.numpy_dtype_promotion("standard"):
        change, _ = jax.jit(steps.update)(gradient, steps.init(params), params)
    return params, gradient, change


def test_adamw_steps_by_the_sign_at_first_and_decays_matrices_alone():
    params, gradient, change = first_step(Optimiser(peak=0.1, warmup=0, weight_decay=0.5, clip=1e9))
    layer, of, step = params["layers"][0], gradient["layers"][0], change["layers"][0]
    np.testing.assert_allclose(step["q"], -0.1 * (np.sign(of["q"]) + 0.5 * layer["q"]), atol=1e-4)
    np.testing.assert_allclose(step["attn_norm"], -0.1 * np.sign(of["attn_norm"]), atol=1e-4)
    np.testing.assert_allclose(
        change["embed"], -0.1 * (np.sign(gradient["embed"]) + 0.5 * params["embed"]), atol=1e-4
    )


def test_muon_makes_steps_of_layers_matrices_orthogonal_and_leaves_tables_to_adamw():
    _, gradient, change = first_step(Optimiser(name="muon", peak=0.1, warmup=0, weight_decay=0.0, clip=1e9))
    for name in ("q", "up", "down"):
        sizes = np.linalg.svd(np.asarray(change["layers"][0][name][0]), compute_uv=False)
        before = np.linalg.svd(np.asarray(gradient["layers"][0][name][0]), compute_uv=False)
        # Newton and Schulz bring all singular values near one another, whatever they were.
        assert sizes.max() / sizes.min() < 2 < before.max() / before.min()
        # A step has the size of an AdamW step: 0.2 per number in the mean of squares.
        assert np.sqrt(np.mean(np.square(change["layers"][0][name]))) == pytest.approx(0.02, rel=0.4)
    # With Nesterov's momentum, the first step of Adam is 1 + b1 / (1 + b1) rates long.
    along = -0.1 * (1 + 0.9 / 1.9) * np.sign(gradient["embed"])
    np.testing.assert_allclose(change["embed"], along, atol=1e-3)


def test_rates_rise_and_fall_as_their_schedule_says():
    rate = learning_rate(Optimiser(peak=2.0, warmup=10, schedule="cosine", floor=0.1), 110)
    half = 2.0 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * 0.5)))
    found = [float(rate(step)) for step in (0, 5, 10, 60, 110)]
    np.testing.assert_allclose(found, [0.0, 1.0, 2.0, half, 0.2], rtol=1e-5)
    assert float(learning_rate(Optimiser(peak=2.0, warmup=0, schedule="constant"), 10)(9)) == 2.0
