"""NSGA-II against dominance by its definition and problems whose front is known."""

import numpy as np

from kvjax.train.conversion.grouping.nsga2 import Evolution, crossed, crowding, fronts, nsga2


def dominates(a, b):
    return all(x <= y for x, y in zip(a, b, strict=True)) and any(x < y for x, y in zip(a, b, strict=True))


def peeled(values):
    """Find the fronts by taking away, again and again, what nothing left dominates."""
    out, left, level = {}, set(range(len(values))), 0
    while left:
        free = {i for i in left if not any(dominates(values[j], values[i]) for j in left)}
        out |= dict.fromkeys(free, level)
        left, level = left - free, level + 1
    return [out[i] for i in range(len(values))]


def test_fronts_are_those_of_repeated_dominance(rng):
    for size, objectives in ((1, 2), (30, 2), (25, 3)):
        # Small integers, so that some points are equal in one objective or in all.
        values = rng.integers(0, 6, (size, objectives)).astype(float)
        assert fronts(values).tolist() == peeled(values)


def test_crowding_is_the_summed_span_of_neighbours(rng):
    values = rng.permutation(np.arange(8.0))[:, None] * [1.0, -3.0]
    order = np.argsort(values[:, 0])
    found = crowding(values)[order]
    assert np.isinf(found[[0, -1]]).all()
    np.testing.assert_allclose(found[1:-1], 2 * 2 / 7)
    assert crowding(np.ones((2, 2))).tolist() == [np.inf, np.inf]


def test_the_whole_front_of_a_small_problem_is_found(rng):
    weights = rng.integers(1, 50, (2, 7)).astype(float)

    def evaluate(genes):
        taken = genes.astype(float)
        return np.stack([taken @ weights[0], (1 - taken) @ weights[1]], 1)

    every = np.array(list(np.ndindex(*(2,) * 7)))
    values = evaluate(every)
    want = np.unique(values[np.array(peeled(values)) == 0], axis=0)
    found = nsga2(evaluate, np.full(7, 2), every[:1], Evolution(60, 40))
    np.testing.assert_array_equal(found.objectives, want)
    np.testing.assert_array_equal(evaluate(found.genes), found.objectives)


def test_tournaments_are_won_by_rank_then_by_crowding(rng):
    genes, rank = np.arange(4)[:, None], np.array([2, 0, 1, 1])
    crowd = np.array([np.inf, 0.0, 1.0, 5.0])
    parents = crossed(rng, genes, rank, crowd, Evolution(20_000, crossover=0.0))[:, 0]
    # The best of four in order wins all its games but those it is not drawn in: 7/16, then 5/16, 3/16, 1/16.
    shares = np.bincount(parents, minlength=4) / 20_000
    np.testing.assert_allclose(shares, np.array([1, 7, 3, 5]) / 16, atol=0.02)


def test_a_child_has_one_stretch_of_its_second_parent(rng):
    genes = np.array([[0] * 6, [1] * 6])
    children = crossed(rng, genes, np.zeros(2, int), np.ones(2), Evolution(2000, crossover=1.0))
    turns = np.abs(np.diff(children, axis=1, append=children[:, :1])).sum(1)
    assert set(turns.tolist()) == {0, 2} and len(np.unique(children, axis=0)) > 20


def test_genes_stay_in_their_ranges_and_solutions_come_once(rng):
    seen = []

    def evaluate(genes):
        seen.extend(map(tuple, genes.tolist()))
        return np.stack([genes.sum(1), -genes.max(1)], 1).astype(float)

    choices = np.array([2, 5, 3])
    nsga2(evaluate, choices, np.zeros((1, 3), int), Evolution(8, 12))
    assert (np.array(seen) < choices).all() and (np.array(seen) >= 0).all()
    assert len({x for x in seen}) > 10
