"""The searches for groups of heads against brute force and shares worked by hand."""

import itertools

import numpy as np
import pytest

from kvjax.train.conversion.grouping.asymgqa import asymgqa
from kvjax.train.conversion.grouping.dha import cut, dha, merges
from kvjax.train.conversion.grouping.key_driven import dgqa_average, dgqa_difference, kdgqa
from kvjax.train.conversion.grouping.nsga2 import Evolution
from kvjax.train.conversion.grouping.products import HeadProducts, cosine, pooling_error
from kvjax.train.conversion.grouping.qcqa import LayerGrouping, group_layer, group_layers, within

SHORT = Evolution(population=60, generations=40)


def partitions(n):
    """All ways to group n heads, groups in the order of their first heads."""
    rows = [(0,)]
    for _ in range(n - 1):
        rows = [(*row, g) for row in rows for g in range(max(row) + 2)]
    return rows


def error(heads, groups):
    """Mean squared difference from the mean of one's group, from the heads themselves."""
    groups = np.array(groups)
    means = np.stack([heads[groups == g].mean(0) for g in groups])
    return ((heads - means) ** 2).mean()


def products(heads):
    return heads @ heads.T / heads.shape[1]


def unit(heads):
    """Heads whose mean square is 1."""
    return heads / np.sqrt((heads**2).mean(1, keepdims=True))


def test_the_pooling_error_is_the_distance_from_group_means(rng):
    heads = rng.standard_normal((5, 30))
    for groups in partitions(5):
        np.testing.assert_allclose(pooling_error(products(heads), groups), error(heads, groups), atol=1e-12)


# --- AsymGQA ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "groups", [2, *(pytest.param(groups, marks=pytest.mark.rotating) for groups in (3, 4))]
)
def test_asymgqa_reaches_the_best_of_all_groupings(groups, rng):
    for _ in range(4):
        heads = rng.standard_normal((6, 5))
        every = [g for g in partitions(6) if max(g) + 1 == groups]
        found = asymgqa(products(heads), groups)
        assert max(found) + 1 == groups
        best = min(error(unit(heads), g) for g in every)
        np.testing.assert_allclose(error(unit(heads), found), best, rtol=1e-9)


@pytest.mark.rotating
def test_asymgqa_in_its_symmetric_form_reaches_the_best_equal_grouping(rng):
    for _ in range(4):
        heads = rng.standard_normal((6, 5))
        every = [g for g in partitions(6) if sorted(np.bincount(g)) == [2, 2, 2]]
        found = asymgqa(products(heads), 3, swap=1.0)
        assert sorted(np.bincount(found)) == [2, 2, 2]
        best = min(error(unit(heads), g) for g in every)
        np.testing.assert_allclose(error(unit(heads), found), best, rtol=1e-9)


def test_asymgqa_minimises_the_loss_it_is_given(rng):
    losses = {g: rng.random() for g in partitions(5) if max(g) == 1}
    seen = []
    found = asymgqa(np.eye(5), 2, loss=lambda g: seen.append(g) or losses[g], nearest=4, seed=1)
    assert found == min(losses, key=losses.get) and set(seen) == set(losses)


# --- QCQA ------------------------------------------------------------------------------------------------


def pareto(points):
    """Those that no other point is at most equal to in both, and less in one."""
    return sorted({p for p in points if not any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points)})


def test_qcqa_finds_the_front_of_all_groupings(rng):
    k, v = rng.standard_normal((2, 6, 4))
    every = [(max(g) + 1, error(k, g) + error(v, g)) for g in partitions(6) if max(g) < 4]
    front = group_layer(HeadProducts(products(k), products(v)), 4, SHORT)
    np.testing.assert_allclose([(x.heads, x.error) for x in front], pareto(every), rtol=1e-9)
    for x in front:
        np.testing.assert_allclose(error(k, x.groups) + error(v, x.groups), x.error, rtol=1e-9)
        assert max(x.groups) + 1 == x.heads


def test_qcqa_is_nowhere_behind_equal_neighbours(rng):
    k, v = rng.standard_normal((2, 12, 4))
    front = group_layer(HeadProducts(products(k), products(v)), 6, Evolution(20, 2))
    for size in (2, 3, 4, 6, 12):
        neighbours = np.arange(12) // size
        most = error(k, neighbours) + error(v, neighbours)
        assert within(front, 12 // size).error <= most + 1e-12


def test_qcqa_finds_the_front_of_all_choices_of_layers(rng):
    fronts = []
    for _ in range(4):
        k, v = rng.standard_normal((2, 5, 3))
        fronts.append(group_layer(HeadProducts(products(k), products(v)), 3, Evolution(30, 10)))
    choices = itertools.product(*([LayerGrouping((0, 1, 2, 3, 4), 5, 0.0), *front] for front in fronts))
    every = [(sum(x.heads for x in c), sum(x.error for x in c)) for c in choices]
    stacks = group_layers(fronts, SHORT)
    np.testing.assert_allclose([(s.heads, s.error) for s in stacks], pareto(every), rtol=1e-9)
    for s in stacks:
        assert sum(5 if g is None else max(g.k) + 1 for g in s.groupings) == s.heads


def test_one_option_per_layer_says_which_layers_to_group(rng):
    options = [[LayerGrouping((0, 0, 1), 2, e)] for e in (0.3, 0.1, 0.2)]
    stacks = group_layers(options, SHORT)
    kept = [[g is None for g in s.groupings] for s in stacks]
    assert kept == [[False] * 3, [True, False, False], [True, False, True], [True] * 3]
    assert [s.heads for s in stacks] == [6, 7, 8, 9]


# --- key-driven ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norms", "heads", "least", "counts"),
    [
        ([1, 2, 4], 8, 0, [0, 2, 6]),  # r = 0, 1/3, 1
        ([0, 1, 1, 1], 4, 0, [1, 1, 1, 1]),  # 4/3 each is 1, and one is left for the smallest
        ([0, 1, 1], 3, 0, [0, 1, 2]),  # 3/2 each is 2, which is one too many
        ([1, 2, 4], 8, 1, [1, 2, 5]),
        ([5, 5], 4, 0, [2, 2]),
        ([5], 3, 0, [3]),
    ],
)
def test_kdgqa_shares_query_heads_as_the_equation_says(norms, heads, least, counts):
    found = kdgqa(np.array(norms, float), heads, least=least)
    assert np.bincount(found.reads, minlength=len(norms)).tolist() == counts
    assert found.reads == tuple(sorted(found.reads)) and found.k == found.v == tuple(range(len(norms)))


@pytest.mark.parametrize("find", [dgqa_difference, dgqa_average])
def test_dgqa_gives_out_all_heads_and_is_off_by_rounding_only(find, rng):
    for seed in range(20):
        norms, earlier = rng.random((2, 4)) + 0.1
        found = find(norms, earlier, 16, least=0, seed=seed)
        counts = np.bincount(found.reads, minlength=4)
        drive = np.abs(norms - earlier) if find is dgqa_difference else 0.9 * norms + 0.1 * earlier
        rounded = np.round(16 * drive / drive.sum())
        assert counts.sum() == 16 and np.abs(counts - rounded).sum() == abs(16 - rounded.sum())
        assert min(np.bincount(find(norms, earlier, 5, seed=seed).reads)) >= 1


# --- DHA -------------------------------------------------------------------------------------------------


def ward(heads):
    """Ward's method by trying every pair at every merge: the groupings, from single heads on."""
    groups, out = list(range(len(heads))), []
    for _ in range(len(heads)):
        out.append(list(groups))
        pairs = itertools.combinations(sorted(set(groups)), 2)
        joined = [[a if g == b else g for g in groups] for a, b in pairs]
        groups = min(joined, key=lambda g: error(heads, g), default=groups)
    return out


def test_merges_are_those_of_wards_method_tried_by_hand(rng):
    heads = unit(rng.standard_normal((7, 4)))
    pairs, added = merges(products(heads))
    for count, want in enumerate(ward(heads)):
        found = cut(pairs, count)
        assert len(set(zip(found, want, strict=True))) == len(set(want)) == max(found) + 1
        np.testing.assert_allclose(added[:count].sum() / 7, error(heads, want), atol=1e-12)


def test_dha_spends_every_budget_exactly_and_best(rng):
    layers = [HeadProducts(*(products(x) for x in rng.standard_normal((2, 4, 6)))) for _ in range(2)]
    trees = [[error_of(x, cut(merges(x)[0], c)) for c in range(4)] for layer in layers for x in layer]
    for heads in range(4, 17):
        found = [g for grouping in dha(layers, heads) for g in grouping[:2]]
        assert sum(max(g) + 1 for g in found) == heads
        cost = sum(error_of(x, g) for x, g in zip([x for y in layers for x in y], found, strict=True))
        counts = [c for c in itertools.product(range(4), repeat=4) if sum(c) == 16 - heads]
        best = min(sum(t[c] for t, c in zip(trees, row, strict=True)) for row in counts)
        np.testing.assert_allclose(cost, best, atol=1e-12)


def test_dha_shares_out_measured_losses(rng):
    layers = [HeadProducts(*(products(x) for x in rng.standard_normal((2, 4, 6)))) for _ in range(2)]
    losses = np.array([[5.0, 0.1], [-0.2, 1.0]])
    every = [x for layer in layers for x in layer]
    cost = [
        [max(loss, 0) * error_of(x, cut(merges(x)[0], c)) / error_of(x, (0,) * 4) for c in range(4)]
        for x, loss in zip(every, losses.ravel(), strict=True)
    ]
    for heads in range(4, 17):
        found = [4 - max(g) - 1 for grouping in dha(layers, heads, losses) for g in grouping[:2]]
        counts = [c for c in itertools.product(range(4), repeat=4) if sum(c) == 16 - heads]
        sums = {row: sum(t[c] for t, c in zip(cost, row, strict=True)) for row in counts}
        np.testing.assert_allclose(sums[tuple(found)], min(sums.values()), atol=1e-12)


def error_of(x, groups):
    return pooling_error(cosine(x), groups)


# --- seeds and refusals ----------------------------------------------------------------------------------


@pytest.mark.rotating
def test_equal_seeds_give_equal_groups_and_different_ones_search_elsewhere(rng):
    one, two = (products(x) for x in rng.standard_normal((2, 16, 8)))
    both = HeadProducts(one, two)
    searches = [
        lambda s: asymgqa(one, 5, iterations=20, seed=s),
        lambda s: group_layer(both, 8, Evolution(10, 3, seed=s)),
        lambda s: group_layers([group_layer(both, 8)] * 6, Evolution(8, 1, seed=s)),
        lambda s: dgqa_average(np.array([1.0, 1.0, 1.0]), np.ones(3), 16, seed=s),
    ]
    for search in searches:
        assert search(0) == search(0)
        assert any(search(s) != search(0) for s in range(1, 6))
    assert dha([both], 9) == dha([both], 9)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: asymgqa(np.eye(4), 5), "4 heads cannot form 5 groups: give 1 to 4"),
        (lambda: asymgqa(np.eye(4), 0), "4 heads cannot form 0 groups: give 1 to 4"),
        (lambda: group_layer(HeadProducts(np.eye(4), np.eye(4)), 6), "4 heads cannot form 6 groups"),
        (lambda: group_layers([[]]), "every layer needs at least one option"),
        (
            lambda: within([LayerGrouping((0, 1), 2, 0.0)], 1),
            "no option has 1 KV heads or fewer: the least is 2",
        ),
        (
            lambda: kdgqa(np.ones(3), 2, least=1),
            "2 query heads cannot give each of 3 KV heads 1: lower least",
        ),
        (lambda: kdgqa(np.ones(3), 4, least=-1), "cannot give each of 3 KV heads -1"),
        (lambda: dha([HeadProducts(np.eye(4), np.eye(4))], 1), "1 layers cannot have 1 .* give 2 to 8"),
        (lambda: dha([HeadProducts(np.eye(4), np.eye(4))], 9), "1 layers cannot have 9 .* give 2 to 8"),
        (lambda: dha([HeadProducts(np.eye(4), np.eye(4))], 5, np.ones((2, 2))), "losses has shape"),
        (lambda: pooling_error(np.eye(3), [0, 1]), "names 2 heads, expected 3"),
    ],
)
def test_what_cannot_be_grouped_is_refused(call, why):
    with pytest.raises(ValueError, match=why):
        call()
