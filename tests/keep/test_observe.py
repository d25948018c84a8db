"""Observations: what a layer records for rows of unequal length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.grammar.kinds import Inputs
from kvjax.keep.observations.observe import Queries, QueryMoments
from kvjax.models.config import Config
from kvjax.models.params import init
from kvjax.steps.prefilling import collect as observed

B, N, K, T, H = 3, 4, 2, 9, 6
COUNT, START = np.array([9, 4, 1]), np.array([0, 5, 2])


def make_inputs(rng):
    pos = np.where(np.arange(T) < COUNT[:, None], START[:, None] + np.arange(T), -1).astype(np.int32)
    q, raw = (jnp.asarray(rng.normal(size=(B, N, T, H)), jnp.float32) for _ in range(2))
    k = jnp.asarray(rng.normal(size=(B, K, T, H)), jnp.float32)
    hidden = jnp.zeros((B, T, 5))
    return Inputs(q, raw, k, hidden, jnp.asarray(pos), jnp.asarray(START + COUNT, jnp.int32))


def test_queries_are_each_rows_last_ones_and_rows_may_have_fewer(rng):
    inputs, last = make_inputs(rng), 3
    q, pos = Queries(last)(inputs)
    assert q.shape == (B, N, last, H)
    for row in range(B):
        want = np.arange(max(COUNT[row] - last, 0), COUNT[row])
        have = np.asarray(pos)[row] >= 0
        assert have.sum() == len(want) and have[last - len(want) :].all()
        np.testing.assert_array_equal(np.asarray(pos)[row][have], START[row] + want)
        np.testing.assert_array_equal(np.asarray(q)[row][:, have], np.asarray(inputs.q)[row][:, want])


def test_moments_are_those_of_the_unrotated_queries_behind_the_skipped_ones(rng):
    inputs, skip = make_inputs(rng), 2
    mean, cov = QueryMoments(skip)(inputs)
    assert QueryMoments(skip, covariance=False)(inputs)[1] is None
    for row, head in np.ndindex(2, N):  # the third row has one token only
        use = np.asarray(inputs.pos)[row] >= skip
        q = np.asarray(inputs.q_raw, np.float64)[row, head][use]
        np.testing.assert_allclose(mean[row, head], q.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(cov[row, head], np.cov(q.T, bias=True), rtol=1e-4, atol=1e-5)


@pytest.mark.rotating
@pytest.mark.parametrize("tokens", [1, 8, 21])
def test_surprisals_are_those_of_the_next_tokens_strip_by_strip(rng, monkeypatch, tokens):
    monkeypatch.setattr(observed, "_STRIP", 8)
    config = Config(vocab=30, d_model=16, layers=1, heads=2, kv_heads=1, head_dim=8, d_ff=16)
    params, ids = init(config, jax.random.key(0)), rng.integers(0, 30, (2, tokens))
    x, pos = rng.normal(size=(2, tokens, 16)), np.broadcast_to(np.arange(tokens), (2, tokens)).copy()
    pos[1, 5:] = -1
    norm, out = (np.asarray(params[n], np.float64) for n in ("norm", "unembed"))
    logits = x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * norm @ out
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    want = np.zeros((2, tokens))
    for b, t in np.ndindex(2, tokens):
        if t and pos[b, t] >= 0:
            want[b, t] = -np.log(p[b, t - 1, ids[b, t]])
    given = jnp.asarray(x, jnp.float32), jnp.asarray(ids, jnp.int32), jnp.asarray(pos, jnp.int32)
    np.testing.assert_allclose(observed.surprisals(params, *given, config), want, rtol=1e-4, atol=1e-5)
