"""Attention Matching's biases and values, on views made by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import AttentionSpec, Observed, View
from kvjax.keep.merges.matched import AttentionMatching
from kvjax.keep.observations.observe import Queries
from kvjax.keep.scores.matched import RootMeanSquare
from kvjax.ops.base.rope import Rope

SLOTS, LAST, WIDTH = 12, 16, 4


def given(rng, live=SLOTS, asked=LAST):
    """Draw a view of one list whose last slots are empty, and queries of two heads; garbage where none is."""
    k, v = (jnp.asarray(rng.normal(size=(1, 1, SLOTS, WIDTH)), jnp.float32) for _ in range(2))
    pos = jnp.where(jnp.arange(SLOTS) < live, jnp.arange(SLOTS), -1)[None, None]
    k = jnp.where(pos[..., None] >= 0, k, 1e3)
    q = jnp.asarray(rng.normal(size=(1, 2, LAST, WIDTH)) / 2, jnp.float32)
    at = jnp.arange(LAST) - (LAST - asked)
    q = jnp.where((at >= 0)[:, None], q, 1e3)
    seen = Observed(
        {key_of(Queries(LAST)): (q, jnp.where(at >= 0, at, -1)[None])}, None,
        jnp.array([live]), jnp.array([4]), 0, AttentionSpec(0.5, None, Rope()),
    )  # fmt: skip
    return View(k, v, pos, None, {}), seen, np.asarray(q[0, :, LAST - asked :], float).reshape(-1, WIDTH)


def leaving(kept):
    return jnp.asarray(np.where(~kept, np.arange(SLOTS), SLOTS)[None, None])


def match(word, view, kept, seen):
    """Match what leaves in the view, by one program."""
    run = jax.jit(lambda view, *lists: word(view, *lists, seen))
    return jax.device_get(run(view, kept[None, None], leaving(kept)))


def attention(q, k, v, bias=0.0):
    e = np.exp(q @ np.asarray(k, float).T / 2 + bias)
    return e.sum(-1), e @ np.asarray(v, float) / e.sum(-1, keepdims=True)


@pytest.mark.rotating
@pytest.mark.parametrize("live", [SLOTS, 9])
def test_more_queries_than_slots_give_least_squares(rng, live):
    view, seen, q = given(rng, live)
    kept = np.isin(np.arange(SLOTS), [0, 2, 3, 7])
    view, got = jax.device_get(view), match(AttentionMatching(LAST, turns=0), view, kept, seen)
    k, v = np.asarray(view.k[0, 0], float), np.asarray(view.v[0, 0], float)
    e = np.exp(q @ k[:live].T / 2)
    e /= e.max(-1, keepdims=True)
    w = np.clip(np.linalg.lstsq(e[:, kept[:live]], e.sum(-1), rcond=None)[0], np.e**-3, np.e**3)
    np.testing.assert_allclose(np.exp(got.bias[0, 0])[kept], w, rtol=1e-3)
    _, want = attention(q, k[:live], v[:live])
    p = e[:, kept[:live]] * w
    p /= p.sum(-1, keepdims=True)
    # Directions that queries hardly feel stay as they are.
    own = v[:live][kept[:live]]
    c = own + np.linalg.pinv(p, 1e-2) @ (want - p @ own)
    np.testing.assert_allclose(got.v[0, 0][kept], c, atol=2e-3)
    found, before = (np.linalg.norm(p @ np.asarray(x)[kept] - want) for x in (got.v[0, 0], v))
    assert found < 0.9 * before
    np.testing.assert_array_equal(got.v[0, 0][~kept], view.v[0, 0][~kept])
    np.testing.assert_array_equal(got.k, view.k)


def test_fewer_queries_than_slots_see_no_difference_and_change_least(rng):
    view, seen, q = given(rng, asked=2)
    kept = np.arange(SLOTS) < 8
    got = match(AttentionMatching(LAST), view, kept, seen)
    total, want = attention(q, view.k[0, 0], view.v[0, 0])
    after, out = attention(q, view.k[0, 0][kept], got.v[0, 0][kept], np.asarray(got.bias[0, 0])[kept])
    np.testing.assert_allclose(after, total, rtol=1e-4)
    np.testing.assert_allclose(out, want, atol=1e-4)
    # Whatever no query of these feels stays: what changes lies in the span of their four rows.
    moved = np.asarray(got.v[0, 0] - view.v[0, 0], float)[kept]
    assert np.linalg.matrix_rank(moved, tol=1e-3) <= 4


def test_weights_stay_within_their_bounds_and_a_list_that_nothing_leaves_as_it_is(rng):
    view, seen, _ = given(rng)
    one = np.arange(SLOTS) == 5
    got = match(AttentionMatching(LAST), view, one, seen)
    assert np.abs(got.bias).max() <= 3 + 1e-6 and np.isfinite(got.v).all()
    all_of_it = np.ones(SLOTS, bool)
    got = match(AttentionMatching(LAST), view, all_of_it, seen)
    np.testing.assert_array_equal(got.v, view.v)
    assert not got.bias.any()


@pytest.mark.rotating
def test_the_score_is_the_root_mean_square_of_what_queries_give_of_all_slots(rng):
    view, seen, q = given(rng, live=9, asked=3)
    e = np.exp(q @ np.asarray(view.k[0, 0, :9], float).T / 2)
    want = np.sqrt(((e / e.sum(-1, keepdims=True)) ** 2).mean(0))
    got = RootMeanSquare(LAST)(view, seen)[0, 0]
    np.testing.assert_allclose(got[:9], want, rtol=1e-5)
    assert not got[9:].any()
