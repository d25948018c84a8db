"""Scores of whole passages, of a number of tokens or between separators, and of which slots are enough."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.grammar.keys import key_of
from kvjax.keep.observations.observe import Mass
from kvjax.keep.observations.trace import AccumulatedMass
from kvjax.keep.scores.enough import LayerTopP, TopP
from kvjax.keep.scores.passages import PassageMean
from kvjax.keep.scores.score import KeyNorm
from kvjax.keep.scores.tokens import IsTokenType
from tests.keep.test_score import B, K, S, check, f32, seen_by
from tests.keep.test_score import view as view  # a fixture


@pytest.mark.parametrize("best", [0, 2])
@pytest.mark.parametrize("cut", [3, IsTokenType((1,))])
def test_a_passage_has_the_mean_of_its_best_slots(view, cut, best):
    marks = np.random.default_rng(2).random((B, K, S)) < 0.4
    view = view._replace(traces={key_of(cut): f32(marks)})
    norm, pos = -np.linalg.norm(np.asarray(view.k, np.float64), axis=-1), np.asarray(view.pos)
    want = np.zeros(norm.shape)
    for b, k in np.ndindex(B, K):
        live = np.flatnonzero(pos[b, k] >= 0)
        which = pos[b, k, live] // 3 if cut == 3 else np.cumsum(marks[b, k, live]) - marks[b, k, live]
        for number in np.unique(which):
            mine = live[which == number]
            want[b, k, mine] = np.sort(norm[b, k, mine])[::-1][: best or None].mean()
    check(PassageMean(KeyNorm(), cut, best)(view, seen_by()), want, view)


def test_the_fewest_slots_that_hold_a_share_of_what_a_head_received_are_enough(view):
    mass = np.random.default_rng(4).random((B, K, S)) ** 3
    view = view._replace(traces={key_of(AccumulatedMass(Mass("sum"))): f32(mass)})
    live = np.asarray(view.pos) >= 0
    want = -np.ones(mass.shape)
    for b, k in np.ndindex(B, K):
        slots = [j for j in np.argsort(-mass[b, k]) if live[b, k, j]]
        total, held = mass[b, k, slots].sum(), 0.0
        for j in slots:
            if held >= 0.8 * total:
                break
            want[b, k, j], held = 1, held + mass[b, k, j]
    assert {-1, 1} == set(want[live])
    check(TopP(0.8)(view, seen_by()), want, view)


@pytest.mark.rotating
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_a_layer_has_as_many_tokens_as_hold_its_share_and_takes_those_with_most_attention_per_query(
    view, share
):
    mass = np.random.default_rng(5).random((B, K, S)) ** 3
    pos = np.broadcast_to(np.asarray(view.pos)[:, :1], (B, K, S))
    view = view._replace(pos=jnp.asarray(pos), traces={key_of(AccumulatedMass(Mass("sum"))): f32(mass)})
    want = -np.ones(mass.shape)
    for b in range(B):
        slots = np.flatnonzero(pos[b, 0] >= 0)
        layer = mass[b].sum(0)[slots]
        most, held = 0, 0.0
        for x in sorted(layer, reverse=True):
            most, held = most + 1, held + x
            if held >= share * layer.sum() - 1e-9:
                break
        each = layer / np.maximum(int(seen_by().length[b]) - pos[b, 0, slots], 1)
        want[b][:, slots[np.argsort(-each)[:most]]] = 1
    check(LayerTopP(share)(view, seen_by()), want, view)
