"""Pages that leave whole, and codes of keys, over slots with empty ones among them."""

import jax.numpy as jnp
import numpy as np

from kvjax.grammar.keys import key_of
from kvjax.keep.observations.observe import Queries
from kvjax.keep.scores.hashed import HashSimilarity
from kvjax.keep.scores.norms import NormRatio, Rounded
from kvjax.keep.scores.pages import WholePages
from kvjax.keep.scores.score import KeyNorm
from tests.keep.test_score import LENGTH, B, G, H, K, check, seen_by, window_of
from tests.keep.test_score import view as view  # a fixture

PAGE = 4


def test_a_page_scores_its_mean_over_all_heads_where_just_a_page_must_leave(view):
    lost = jnp.asarray(LENGTH - PAGE, jnp.int32)
    got = np.asarray(WholePages(KeyNorm(), PAGE)(view, seen_by()._replace(n=lost)))
    norm = -np.linalg.norm(np.asarray(view.k, np.float64), axis=-1)
    # 20 tokens are five pages, the last the newest; of 13 tokens, the newest lie in the third and fourth.
    for b, pages in enumerate((4, 2)):
        for i in range(pages):
            at = slice(i * PAGE, (i + 1) * PAGE)
            np.testing.assert_allclose(got[b, :, at], norm[b, :, at].mean(), rtol=1e-5)
        assert np.isinf(got[b, :, pages * PAGE : LENGTH[b]]).all()


def test_single_slots_are_scored_where_more_must_leave(view):
    got = WholePages(NormRatio(), PAGE)(view, seen_by())
    k, v = (np.linalg.norm(np.asarray(x, np.float64), axis=-1) for x in (view.k, view.v))
    newest = np.asarray(view.pos) >= (LENGTH - PAGE)[:, None, None]
    live = np.asarray(view.pos) >= 0
    np.testing.assert_allclose(np.asarray(got)[live], np.where(newest, np.inf, v / k)[live], rtol=1e-5)
    assert WholePages(NormRatio(), PAGE).ordered and WholePages(NormRatio(), PAGE).looks


def test_hash_likeness_counts_the_hyperplanes_that_part_a_key_from_a_groups_queries(rng, view):
    q, q_pos = window_of(rng, 1)
    got = HashSimilarity(12, seed=3)(view, seen_by({key_of(Queries(1)): (q, q_pos)}))
    planes = np.random.RandomState([3, H]).standard_normal((H, 12))
    code = lambda x: np.asarray(x, np.float64) @ planes > 0  # noqa: E731
    differs = code(q).reshape(B, K, G, 1, 12) != code(view.k)[:, :, None]
    check(got, -differs.sum((2, 4)), view)


def test_a_key_in_the_direction_of_the_query_differs_in_no_bit(rng, view):
    q, q_pos = window_of(rng, 1)
    one = q.reshape(B, K, G, 1, H)[:, :, :1]
    alike = jnp.broadcast_to(one, (B, K, G, 1, H)).reshape(q.shape)
    same = view._replace(k=view.k.at[:, :, 0].set(3.0 * one[:, :, 0, 0]).at[:, :, 1].set(-one[:, :, 0, 0]))
    got = HashSimilarity(9)(same, seen_by({key_of(Queries(1)): (alike, q_pos)}))
    assert (got[:, :, 0] == 0).all() and (got[:, :, 1] == -9 * G).all()


def test_norms_that_only_rounding_tells_apart_are_equal(view):
    k = np.asarray(view.k).copy()
    k[:, :, 1] = k[:, :, 0] * np.float32(1 + 3e-7)
    got = np.asarray(Rounded(KeyNorm())(view._replace(k=jnp.asarray(k)), seen_by()))
    assert (got[:, :, 0] == got[:, :, 1]).all() and len(np.unique(got)) > got.size / 2
    np.testing.assert_allclose(got, -np.linalg.norm(k, axis=-1), rtol=1e-5)
