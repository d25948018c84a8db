"""Budgets of layers, where these differ more than in small models."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.eval.run.newest import keeping_newest
from kvjax.grammar.keys import key_of
from kvjax.grammar.refuse_keep import crowded
from kvjax.keep.budgets.budget import AcrossHeads, AcrossLayers
from kvjax.keep.budgets.layer_budgets import ByDecay, ByHits, ByPrefix, ByUncertainty, MeanOverHeads
from kvjax.keep.budgets.preference import ByAttention
from kvjax.keep.budgets.profile import ByProfile, CopyProfile
from kvjax.keep.budgets.pyramid import Pyramid
from kvjax.keep.observations.observe import Queries
from kvjax.keep.scores.score import KeyNorm
from tests.keep.test_score import LENGTH, B, G, K, S, check, f32, probabilities, seen_by, window_of
from tests.keep.test_score import view as view  # a fixture
from tests.sweep import sweep

LAYERS, LAST = 3, 4


def scores_of(rng, sharp, protected=2):
    """Scores [L, B, K, S] of unequal sharpness, infinite for the first slots and -inf for empty ones."""
    s = rng.random((LAYERS, B, 1, S)) ** np.array(sharp)[:, None, None, None]
    s = np.broadcast_to(s, (LAYERS, B, K, S)).copy()
    s[..., :protected] = np.inf
    for b in range(B):
        s[:, b, :, LENGTH[b] :] = -np.inf
    return s


def test_layers_keep_prefixes_of_equal_shares_that_fill_the_stack(rng):
    s, n = scores_of(rng, [0.1, 2, 12]), LENGTH // 2
    got = np.asarray(ByPrefix().counts(f32(s), jnp.asarray(n)))
    for b in range(B):
        free = s[:, b, 0, 2 : LENGTH[b]]
        ranked = np.sort(free, -1)[:, ::-1]
        before = (ranked.cumsum(-1) - ranked) / ranked.sum(-1, keepdims=True)
        order = np.argsort(before, axis=None)[: LAYERS * (n[b] - 2)]
        want = 2 + np.bincount(order // free.shape[1], minlength=LAYERS)
        assert got[:, b].tolist() == [[c] * K for c in want] and want[0] > want[1] > want[2]


ALLOCATIONS = {
    "heads": AcrossHeads(),
    "layers": AcrossLayers(),
    "hits": ByHits(2.0),
    "prefix": ByPrefix(),
    "decay": ByDecay(2),
    "pyramid": Pyramid(window=2),
    "attention": ByAttention(2),
    "profile": ByProfile(CopyProfile(), 2, 1.2),
    "uncertainty": ByUncertainty(2),
}


@pytest.mark.rotating
@pytest.mark.parametrize("spare", sweep([0, 1, 2, 5], 1))
@pytest.mark.parametrize("name", ALLOCATIONS)
def test_few_slots_beside_protected_ones_are_no_more_than_the_budget(name, spare, rng):
    s, n = scores_of(rng, [0.1, 2, 12]), np.full(B, 2 + spare)
    allocate, more = ALLOCATIONS[name], []
    if hasattr(allocate, "preference"):
        more = [f32(rng.random((LAYERS, B, K)) + 0.1)]
    got = np.asarray(allocate.counts(f32(s), jnp.asarray(n), *more))
    assert (got.sum((0, 2)) <= LAYERS * K * n).all()
    assert (got >= 2).all()


def test_prefixes_of_scores_that_sum_to_nothing_follow_what_is_above_zero(rng):
    """Where negative scores counted, a layer's sum could be 0, and noise would say what it keeps."""
    s, n = scores_of(rng, [1, 1, 1]), jnp.asarray(LENGTH // 2)
    signed = np.where(np.isfinite(s), s - 0.6, s)
    want = ByPrefix().counts(f32(np.where(np.isfinite(s), np.maximum(s - 0.6, 0), s)), n)
    assert ByPrefix().counts(f32(signed), n).tolist() == want.tolist()


def test_hits_share_the_stack_up_to_a_limit(rng):
    s = scores_of(rng, [0.1, 1, 1])
    s += np.arange(S * K).reshape(K, S) * 1e-4
    n = LENGTH // 2
    for most in (10.0, 1.5):
        got = np.asarray(ByHits(most).counts(f32(s), jnp.asarray(n)))
        for b in range(B):
            spare, free = n[b] - 2, s[:, b, :, 2 : LENGTH[b]]
            order = np.argsort(-free, axis=None, kind="stable")[: LAYERS * K * spare]
            hits = np.bincount(order // free[0].size, minlength=LAYERS) // K
            assert got[:, b, 0].sum() == LAYERS * n[b] and got[:, b].std(1).max() == 0
            if most == 10.0:
                assert (abs(got[:, b, 0] - 2 - hits) <= LAYERS).all() and got[0, b, 0] > n[b]
            else:
                assert got[0, b, 0] == 2 + min(int(1.5 * spare), LENGTH[b] - 2)


@pytest.mark.rotating
def test_a_layer_needs_the_fewest_tokens_that_hold_a_share_of_the_windows_attention(rng, view):
    q, q_pos = window_of(rng, LAST)
    got = ByUncertainty(LAST, 0.8).preference(view, seen_by({key_of(Queries(LAST)): (q, q_pos)}))
    p, pos = probabilities(view, q, q_pos), np.asarray(view.pos)
    for b in range(B):
        given = p[b].sum(2)[..., : LENGTH[b] - LAST]
        held = np.cumsum(np.sort(given, -1)[..., ::-1], -1) / given.sum(-1, keepdims=True)
        np.testing.assert_allclose(got[b], (np.argmax(held >= 0.8, -1) + 1).mean(), rtol=1e-6)
    assert pos.shape[2] == S


def test_heads_that_keep_together_share_the_mean_of_their_scores(view):
    norms = -np.linalg.norm(np.asarray(view.k, np.float64), axis=-1)
    check(MeanOverHeads(KeyNorm())(view, seen_by()), norms.mean(1, keepdims=True), view)
    assert G > 1 and MeanOverHeads(KeyNorm()).looks


@pytest.mark.rotating
def test_every_layer_keeps_what_is_protected_where_that_is_more_than_the_window():
    scores = jnp.zeros((2, 2, 1, 12)).at[:, 0, :, :6].set(jnp.inf).at[:, 1, :, :1].set(jnp.inf)
    n, preferred = jnp.array([8, 8], jnp.int32), jnp.array([[[3.0], [1.0]], [[1.0], [1.0]]])
    # Row 0 protects 6 slots of 8, so 4 are shared; row 1 protects 1, within the window of 2, so 12 are.
    asked = ByAttention(2).counts(scores, n, preferred)[..., 0]
    assert asked.tolist() == [[6 + 3, 2 + 6], [6 + 1, 2 + 6]]
    assert ByDecay(2, 0.5).counts(scores, n)[..., 0].tolist() == [[8, 8], [8, 8]]
    text = "cake(budget=0.25, window=16)"
    assert crowded(keeping_newest(kvjax.method(text), 104).keep, 880) == ""
