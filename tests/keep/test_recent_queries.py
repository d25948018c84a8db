"""Scores by the newest queries, over slots with biases and soft-caps, and rows with empty slots."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.grammar.keys import key_of
from kvjax.keep.budgets.budget import UpTo
from kvjax.keep.observations.observe import Mass, Queries
from kvjax.keep.observations.trace import AccumulatedMass
from kvjax.keep.scores.deviation import AttentionDeviation
from kvjax.keep.scores.recent_queries import FusedAttention, Votes
from tests.keep.test_score import (
    CAP,
    LENGTH,
    SCALE,
    B,
    G,
    H,
    K,
    N,
    S,
    check,
    f32,
    probabilities,
    seen_by,
    window_of,
)
from tests.keep.test_score import view as view  # a fixture
from tests.sweep import sweep

LAST = 4


@pytest.mark.parametrize("fusion", sweep(["sum", "max"], "max"))
def test_fused_attention_is_a_softmax_over_older_slots_of_logits_summed_over_a_group(rng, view, fusion):
    q, q_pos = window_of(rng, LAST)
    got = FusedAttention(LAST, fusion)(view, seen_by({key_of(Queries(LAST)): (q, q_pos)}))
    k, bias = np.asarray(view.k, np.float64), np.asarray(view.bias, np.float64)
    s = np.einsum("bkgwh,bksh->bkgws", np.asarray(q, np.float64).reshape(B, K, G, LAST, H), k) * SCALE
    s = (CAP * np.tanh(s / CAP) + bias[:, :, None, None]).sum(2)
    pos = np.asarray(view.pos)
    older = (pos >= 0) & (pos < (LENGTH - LAST)[:, None, None])
    p = np.where(older[:, :, None], np.exp(s), 0)
    check(got, getattr(np, fusion)(p / p.sum(-1, keepdims=True), 2), view)


def test_votes_are_attention_in_even_shares_and_only_the_best_have_any(rng, view):
    q, q_pos = window_of(rng, LAST)
    got = np.asarray(Votes(LAST, 2)(view, seen_by({key_of(Queries(LAST)): (q, q_pos)})))
    share = probabilities(view, q, q_pos) * (np.asarray(q_pos) + 1)[:, None, None, :, None]
    share, pos = share.max((2, 3)), np.asarray(view.pos)
    share[pos >= (LENGTH - 2)[:, None, None]] = np.inf
    for b, n in enumerate(LENGTH // 2):
        best = np.argsort(-np.where(pos[b] < 0, -1, share[b]), -1)[:, :n]
        want = np.full((K, S), -1.0)
        np.put_along_axis(want, best, np.take_along_axis(share[b], best, -1), -1)
        check(got[b : b + 1], want, view._replace(pos=view.pos[b : b + 1]))


def test_what_lies_in_empty_slots_changes_no_vote(rng, view):
    seen = seen_by({key_of(Queries(LAST)): window_of(rng, LAST)})
    empty = (view.pos < 0)[..., None]
    dirty = view._replace(k=jnp.where(empty, 1e3, view.k))
    live = np.asarray(view.pos) >= 0
    for word in (Votes(LAST, 2), FusedAttention(LAST)):
        np.testing.assert_array_equal(np.asarray(word(dirty, seen))[live], np.asarray(word(view, seen))[live])


def test_up_to_keeps_what_reaches_its_threshold_within_the_budget():
    scores = jnp.asarray([[[[3.0, -1.0, 1.0, 0.5], [1.0, 2.0, 3.0, 4.0]]]])
    assert UpTo(1.0).counts(scores, jnp.asarray([3])).tolist() == [[[2, 3]]]
    assert UpTo(1.0).layer_slots(3, 9, 2, 2) == [6, 6]


def test_the_deviation_is_that_of_every_probability_a_slot_has_received(rng, view):
    live, viewers = np.asarray(view.pos) >= 0, LENGTH[:, None, None] - np.asarray(view.pos)
    p = rng.random((S * G, B, K, S)) * (np.arange(S * G)[:, None, None, None] < viewers * G)
    traces = {
        key_of(AccumulatedMass(Mass("sum"))): f32(p.sum(0)),
        key_of(AccumulatedMass(Mass("squares"))): f32((p**2).sum(0)),
    }
    seen = seen_by({key_of(Queries(1)): (jnp.zeros((B, N, 1, H)), jnp.zeros((B, 1), jnp.int32))})
    got = AttentionDeviation(newest=3)(view._replace(traces=traces), seen)
    want = np.zeros((B, K, S))
    for at in np.argwhere(live):
        b, k, j = at
        want[b, k, j] = p[: viewers[b, 0, j] * G, b, k, j].std() if viewers[b, 0, j] > 3 else np.inf
    check(got, want, view)
