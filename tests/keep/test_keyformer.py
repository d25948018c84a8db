"""Keyformer's noisy attention, over more queries than one strip, and scores that fade with age."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.keep.algebra import Aged
from kvjax.keep.keyformer import NoisyMass
from kvjax.keep.score import Position
from tests.keep.test_score import LENGTH, check, seen_by
from tests.keep.test_score import view as view  # a fixture
from tests.reference import softmax


def test_noisy_attention_is_a_softmax_of_logits_with_gumbel_noise_that_gets_warmer():
    rng, (n, kv, t, h) = np.random.default_rng(0), (4, 2, 300, 8)
    q, k = rng.normal(size=(1, n, t, h)), rng.normal(size=(1, kv, t, h))
    at = np.arange(t)
    at[-4:] = -1
    word = NoisyMass(tau=0.5, tau_end=3.0, horizon=200, seed=3)
    arrays = (jnp.asarray(x, jnp.float32) for x in (q, k))
    pos = jnp.asarray(at[None], jnp.int32)
    queries, keys = arrays
    found = np.asarray(word.of(queries, pos, keys, pos[:, None]))
    want = np.zeros((kv, t))
    for head in range(n):
        key = jax.random.fold_in(jax.random.key(3), head // 2)
        noise = np.array([float(jax.random.gumbel(jax.random.fold_in(key, max(int(p), 0)))) for p in at])
        s = q[0, head, :-4] @ k[0, head // 2].T / np.sqrt(h) + noise
        s = s / (0.5 + 2.5 * np.minimum(at[:-4, None] / 200, 1))
        s[(at[None] < 0) | (at[None] > at[:-4, None])] = -np.inf
        want[head // 2] += softmax(s).sum(0)
    np.testing.assert_allclose(found[0], want, rtol=2e-5, atol=1e-6)


def test_a_score_fades_with_the_tokens_that_came_since(view):
    pos = np.asarray(view.pos)
    want = pos * 0.5 ** ((LENGTH[:, None, None] - 1 - pos) / 3)
    check(Aged(Position(), 0.5, 3)(view, seen_by()), want, view)
