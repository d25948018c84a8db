"""Keyformer's noisy attention, over more queries than one strip, and scores that fade with age."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.keep.algebra import AgeDecayed
from kvjax.keep.scores.keyformer import NoisyMass, gumbel
from kvjax.keep.scores.score import Position
from tests.float64.reference import softmax
from tests.keep.test_score import LENGTH, check, seen_by
from tests.keep.test_score import view as view  # a fixture


def test_noisy_attention_is_a_softmax_of_logits_with_gumbel_noise_that_gets_warmer():
    rng, (n, kv, t, h) = np.random.default_rng(0), (4, 2, 300, 8)
    q, k = rng.normal(size=(1, n, t, h)), rng.normal(size=(1, kv, t, h))
    at = np.arange(t)
    at[-4:] = -1
    word = NoisyMass(tau=0.5, tau_end=3.0, horizon=200, seed=3)
    arrays = (jnp.asarray(x, jnp.float32) for x in (q, k))
    pos = jnp.asarray(at[None], jnp.int32)
    queries, keys = arrays
    found = np.asarray(word.of(queries, pos, keys, pos[:, None], 5))
    noise = np.asarray(word.draws(pos, jnp.broadcast_to(pos[:, None], (1, kv, t)), n, 5), np.float64)[0]
    want = np.zeros((kv, t))
    for head in range(n):
        s = q[0, head, :-4] @ k[0, head // 2].T / np.sqrt(h) + noise[head, :-4]
        s = s / (0.5 + 2.5 * np.minimum(at[:-4, None] / 200, 1))
        s[(at[None] < 0) | (at[None] > at[:-4, None])] = -np.inf
        want[head // 2] += softmax(s).sum(0)
    np.testing.assert_allclose(found[0], want, rtol=2e-5, atol=1e-6)


@pytest.mark.rotating
def test_noise_is_gumbel_and_new_for_every_query_key_head_layer_and_seed():
    at = jnp.arange(100, dtype=jnp.int32)[None]
    draws = lambda seed, layer: NoisyMass(seed=seed).draws(at, at[:, None], 2, layer)[0]  # noqa: E731
    found = np.stack([draws(0, 0), draws(0, 1), draws(1, 0)])
    np.testing.assert_array_equal(found[0], draws(0, 0))
    assert len(np.unique(found)) > 0.995 * found.size
    # Standard Gumbel: the mean is Euler's constant, the variance pi^2 / 6; P(z < 0) = 1 / e.
    np.testing.assert_allclose(found.mean((1, 2, 3)), np.euler_gamma, atol=0.04)
    np.testing.assert_allclose(found.var((1, 2, 3)), np.pi**2 / 6, rtol=0.06)
    np.testing.assert_allclose((found < 0).mean((1, 2, 3)), np.exp(-1), atol=0.015)
    flat = found.reshape(6, -1)
    assert np.abs(np.corrcoef(flat) - np.eye(6)).max() < 0.05
    for rows in (found[0, 0], found[0, 0].T):
        assert np.abs(np.corrcoef(rows) - np.eye(100)).max() < 0.55


def test_noise_is_finite_for_the_smallest_and_the_largest_bits():
    bits = np.array([0, 1, 2**31, 2**32 - 513, 2**32 - 512, 2**32 - 1], np.uint32)
    uniform = ((bits >> 9).astype(np.float64) + 0.5) / 2**23
    np.testing.assert_allclose(gumbel(jnp.asarray(bits)), -np.log(-np.log(uniform)), rtol=2e-6)


def test_a_score_fades_with_the_tokens_that_came_since(view):
    pos = np.asarray(view.pos)
    want = pos * 0.5 ** ((LENGTH[:, None, None] - 1 - pos) / 3)
    check(AgeDecayed(Position(), 0.5, 3)(view, seen_by()), want, view)
