"""Slots that stay by chance, and layers that look at the ends alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.grammar.keys import key_of
from kvjax.keep.algebra import Word
from kvjax.keep.budgets.lazy import Lookback
from kvjax.keep.observations.observe import Queries
from kvjax.keep.scores.drawn import GumbelTopK
from kvjax.keep.scores.score import KeyNorm, RandomScore
from tests.keep.test_score import LENGTH, check, probabilities, seen_by, slots, window_of


@dataclasses.dataclass(frozen=True)
class Growing(Word):
    """log(1 + position): chances that grow in proportion."""

    def __call__(self, view, seen):
        return jnp.log1p(view.pos.astype(jnp.float32))


def test_a_drawn_score_is_the_score_with_gumbel_noise(rng):
    view, seen = slots(rng), seen_by()
    u = np.asarray(RandomScore(3)(view, seen), np.float64)
    want = -np.linalg.norm(np.asarray(view.k, np.float64), axis=-1) - np.log(-np.log(u))
    np.testing.assert_allclose(GumbelTopK(KeyNorm(), 3)(view, seen)[0], want[0], rtol=1e-4, atol=1e-4)


@pytest.mark.rotating
def test_slots_are_drawn_in_proportion_to_the_exponential_of_their_scores(rng):
    """Over many layers, the first of 20 tokens drawn is j with chance (1 + j) / 210."""
    view = slots(rng)
    drawn = jax.vmap(lambda layer: GumbelTopK(Growing(), 3)(view, seen_by(layer=layer)))(jnp.arange(400))
    found = np.bincount(np.asarray(drawn)[:, 0].argmax(-1).ravel(), minlength=20) / (400 * 3)
    want = (1 + np.arange(20)) / 210
    assert np.abs(found - want).max() < 4 * np.sqrt(want.max() / 1200)
    assert found[10:].sum() > 0.65


@pytest.mark.rotating
def test_lookback_is_what_the_last_queries_give_to_all_but_the_ends(rng):
    view, (q, q_pos) = slots(rng), window_of(rng, 3)
    got = Lookback(3, sinks=2, window=5)(view, seen_by({key_of(Queries(3)): (q, q_pos)}))
    p = probabilities(view, q, q_pos)
    at = np.asarray(view.pos)
    between = (at >= 2) & (at < (LENGTH - 5)[:, None, None])
    want = np.where(between[:, :, None, None], p, 0).sum(-1).mean((1, 2, 3))
    check(got, want[:, None, None], view)
