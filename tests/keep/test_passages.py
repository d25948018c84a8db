"""Scores of whole passages, of a number of tokens or between separators, and of which slots are enough."""

import numpy as np
import pytest

from kvjax.keep.observations.observe import Mass
from kvjax.keep.observations.trace import Received
from kvjax.keep.scores.enough import Covering
from kvjax.keep.scores.passages import InPassages
from kvjax.keep.scores.score import KeyNorm
from kvjax.keep.scores.tokens import TokensOf
from tests.keep.test_score import B, K, S, check, f32, seen_by
from tests.keep.test_score import view as view  # a fixture


@pytest.mark.parametrize("best", [0, 2])
@pytest.mark.parametrize("cut", [3, TokensOf((1,))])
def test_a_passage_has_the_mean_of_its_best_slots(view, cut, best):
    marks = np.random.default_rng(2).random((B, K, S)) < 0.4
    view = view._replace(traces={repr(cut): f32(marks)})
    norm, pos = -np.linalg.norm(np.asarray(view.k, np.float64), axis=-1), np.asarray(view.pos)
    want = np.zeros(norm.shape)
    for b, k in np.ndindex(B, K):
        live = np.flatnonzero(pos[b, k] >= 0)
        which = pos[b, k, live] // 3 if cut == 3 else np.cumsum(marks[b, k, live]) - marks[b, k, live]
        for number in np.unique(which):
            mine = live[which == number]
            want[b, k, mine] = np.sort(norm[b, k, mine])[::-1][: best or None].mean()
    check(InPassages(KeyNorm(), cut, best)(view, seen_by()), want, view)


def test_the_fewest_slots_that_hold_a_share_of_what_a_head_received_are_enough(view):
    mass = np.random.default_rng(4).random((B, K, S)) ** 3
    view = view._replace(traces={repr(Received(Mass("sum"))): f32(mass)})
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
    check(Covering(0.8)(view, seen_by()), want, view)
