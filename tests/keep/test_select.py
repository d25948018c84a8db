"""Selection: the best slots, deterministically, and their lists."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.keep.select import ranks, slot_lists, top


def draw(rng):
    """Scores with many ties, protected (+inf) and empty (-inf) slots."""
    scores = rng.integers(0, 6, (2, 3, 4, 25)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.1] = np.inf
    scores[rng.random(scores.shape) < 0.2] = -np.inf
    return scores


def best_first(row):
    """Slots by descending score; of equal ones the earlier slot first."""
    return sorted(range(len(row)), key=lambda j: (-row[j], j))


def test_ranks_count_the_better_slots_and_ties_rank_by_slot_order(rng):
    scores = draw(rng)
    got = np.asarray(ranks(jnp.asarray(scores)))
    for at in np.ndindex(scores.shape[:-1]):
        assert [int(j) for j in np.argsort(got[at])] == best_first(scores[at])


def test_ranks_are_taken_in_float32():
    # bfloat16 cannot tell these apart, float32 can; a cast before ranking would rank by slot order.
    scores = jnp.asarray([1.0, 1.0 + 2**-20], jnp.float32)
    np.testing.assert_array_equal(ranks(scores), [1, 0])


def test_top_takes_the_count_of_best_slots_and_never_an_empty_one(rng):
    scores = draw(rng)
    counts = rng.integers(0, 26, scores.shape[:-1])
    got = np.asarray(top(jnp.asarray(scores), jnp.asarray(counts)))
    for at in np.ndindex(scores.shape[:-1]):
        want = {j for j in best_first(scores[at])[: counts[at]] if scores[at][j] > -np.inf}
        assert set(np.flatnonzero(got[at])) == want


@pytest.mark.parametrize("capacity", [0, 5, 25, 40])
def test_slot_lists_name_the_kept_slots_in_slot_order(rng, capacity):
    kept = rng.random((2, 3, 25)) < 0.3
    index, used = (np.asarray(x) for x in slot_lists(jnp.asarray(kept), capacity))
    assert index.shape == used.shape == (2, 3, capacity)
    for at in np.ndindex(kept.shape[:-1]):
        want = np.flatnonzero(kept[at])[:capacity]
        np.testing.assert_array_equal(index[at][used[at]], want)
        assert used[at].sum() == len(want) and used[at][: len(want)].all()
        assert (index[at][~used[at]] == 0).all()
