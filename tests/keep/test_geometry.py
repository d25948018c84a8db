"""Scores by where keys and values lie, and by attention within chunks, in float64 numpy.

`view` has a row that ends in empty slots, which are full of numbers that must not count.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import AttentionSpec
from kvjax.keep.algebra import standardised
from kvjax.keep.observations.observe import QueryMoments
from kvjax.keep.scores import geometry
from kvjax.keep.scores.geometry import Leverage, LocalNorms, ValueLeverage, unrotated
from kvjax.keep.scores.non_causal import ChunkMass
from kvjax.keep.scores.score import KeyNorm
from kvjax.ops.base.rope import Rope, angles, rotate
from tests.float64.reference import rope, softmax
from tests.keep.test_score import LENGTH, B, G, H, K, S, check, f32, seen_by, slots
from tests.methods.expected import leverage
from tests.sweep import sweep


@pytest.fixture
def view(rng):
    return slots(rng)


def told(word, view, seen):
    """Return what a word says of the slots, by one program."""
    return jax.jit(lambda view: word(view, seen))(view)


def lists(view):
    """(row, head, its live slots' keys and values), in float64."""
    for b, h in np.ndindex(B, K):
        k, v = (np.asarray(x[b, h, : LENGTH[b]], np.float64) for x in (view.k, view.v))
        yield b, h, k, v


def test_keys_are_turned_back_whatever_rope_did_to_them(view):
    spec = Rope(kind="yarn", factor=4.0, original_max=8)
    seen = seen_by()._replace(attention=AttentionSpec(1.0, None, spec))

    @jax.jit
    def back(view):
        return unrotated(view._replace(k=rotate(view.k, *angles(spec, view.pos, H))), seen)

    np.testing.assert_allclose(back(view)[0], view.k[0], rtol=1e-5, atol=1e-5)


@pytest.mark.rotating
@pytest.mark.parametrize("rank", [3, 12])
def test_leverage_is_the_diagonal_of_the_ridge_projection_of_sketched_unrotated_keys(view, rank):
    word = Leverage(rank, ridge=0.1)
    phi = np.asarray(word.sketch(seen_by(), H), np.float64)
    assert phi.shape == (H, rank) and abs(phi.std() * rank**0.5 - 1) < 0.3
    want = np.zeros((B, K, S))
    for b, h, k, _ in lists(view):
        raw = rope(k, -np.arange(len(k)), 10000.0)
        want[b, h, : len(k)] = leverage((raw - raw.mean(0)) @ phi, 0.1)
    check(told(word, view, seen_by()), want, view)


@pytest.mark.rotating
def test_leverage_holds_where_the_ridge_is_less_than_the_rounding_of_the_sum(rng):
    """Long texts of large keys, and more sketched dimensions than channels, which many keys leave empty."""
    channels = 10 * np.exp(rng.normal(size=32))
    x = rng.normal(size=(1, 2, 4096, 32)) * channels @ rng.normal(size=(32, 48))
    x = f32(x) / 48**0.5
    got = jax.jit(lambda x: geometry.leverage(x, jnp.ones(x.shape[:3]), 1e-2))(x)
    want = [leverage(np.asarray(one, np.float64), 1e-2) for one in x[0]]
    np.testing.assert_allclose(got[0], want, rtol=1e-4)


def test_local_norms_are_shares_of_a_window_and_add_up_to_one(view):
    got, want = told(LocalNorms(6), view, seen_by()), np.zeros((B, K, S))
    for b, h, k, v in lists(view):
        for at in range(0, len(k), 6):
            a, c = ((x[at : at + 6] ** 2).sum(-1) for x in (k, v))
            want[b, h, at : at + len(a)] = a / a.sum() * c / c.sum()
    check(got, want / want.sum(-1, keepdims=True), view)


def test_capacity_weighs_leverage_by_the_cosine_to_a_mean_query(rng, view):
    mean, word = rng.normal(size=(B, K * G, H)), ValueLeverage(tau=2.0, future=3, sinks=2)
    got = told(word, view, seen_by({key_of(QueryMoments(2, covariance=False)): (f32(mean), None)}))
    want = np.zeros((B, K, S))
    for b, h, k, v in lists(view):
        for q in mean[b, h * G : (h + 1) * G]:
            q = np.mean([rope(q[None], [LENGTH[b] + i], 10000.0)[0] for i in range(3)], 0)
            cosine = k[2:] @ q / np.linalg.norm(k[2:], axis=-1) / np.linalg.norm(q)
            w = np.exp(2 * (cosine - cosine.max()))
            want[b, h, 2 : len(k)] += w * leverage(v[2:], 1.0, w + 1e-6) / G
    check(got, want, view)


@pytest.mark.parametrize("chunk", sweep([4, 7, 64], 7))
def test_the_tokens_of_a_chunk_see_each_other_and_no_older_slot(rng, chunk):
    t, start = 10, np.array([5, 0])
    q, k = rng.normal(size=(B, K * G, t, H)), rng.normal(size=(B, K, t, H))
    lengths = np.array([10, 7])
    at = np.where(np.arange(t) < lengths[:, None], start[:, None] + np.arange(t), -1)
    of = jax.jit(ChunkMass(chunk).of)
    got = np.asarray(of(f32(q), at, f32(k), at[:, None]))
    want = np.zeros((B, K, t))
    for b, head in np.ndindex(B, K * G):
        for first in range(0, lengths[b], chunk):
            here = slice(first, min(first + chunk, lengths[b]))
            want[b, head // G, here] += softmax(q[b, head, here] @ k[b, head // G, here].T).sum(0) / G
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    # What is held from before receives nothing, in any number of slots.
    for many in (t, t + 3):
        older = np.broadcast_to(np.where(np.arange(many) < 5, np.arange(many), -1), (B, K, many))
        held = of(f32(q), at, jnp.ones((B, K, many, H)), older)
        assert not np.asarray(held)[0].any()


def test_a_token_of_its_own_step_gives_all_to_itself(rng):
    q, k = f32(rng.normal(size=(B, K * G, 1, H))), f32(rng.normal(size=(B, K, 4, H)))
    pos = jnp.broadcast_to(jnp.asarray([3, 0, -1, 2]), (B, K, 4))
    got = ChunkMass(8).of(q, jnp.asarray([[3], [2]]), k, pos)
    np.testing.assert_array_equal(got[:, 0], [[1, 0, 0, 0], [0, 0, 0, 1]])


def test_standardised_scores_have_mean_0_and_variance_1_over_the_live_slots_of_a_layer(view):
    live = np.asarray(view.pos) >= 0
    x = np.asarray(KeyNorm()(view, seen_by()), np.float64)
    want = np.stack([(x[b] - x[b][live[b]].mean()) / x[b][live[b]].std(ddof=1) for b in range(B)])
    check(standardised(KeyNorm())(view, seen_by()), want, view)
