"""Budgets over heads and layers: totals, floors, and the published formulas in plain Python."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.grammar import Budget
from kvjax.keep.budgets.budget import AcrossHeads, AcrossLayers, Uniform
from kvjax.keep.budgets.pyramid import Pyramid
from kvjax.place.paged import pool_pages
from tests.sweep import sweep

L, B, K, S = 4, 3, 3, 40
LENGTHS = np.array([40, 31, 17])


def draw(rng, lengths=LENGTHS, layers=L, slots=S):
    """Distinct scores, -inf beyond each row's length, heads and layers of different scale."""
    scores = rng.permutation(layers * len(lengths) * K * slots).reshape(layers, len(lengths), K, slots) / 1e3
    scores *= rng.uniform(0.2, 2, (layers, 1, K, 1))
    scores = np.where(np.arange(slots) < lengths[:, None, None], scores, -np.inf)
    return jnp.asarray(scores, jnp.float32)


@partial(jax.jit, static_argnums=0)
def _counts(allocation, scores, n):
    return allocation.counts(scores, n)


def counts(allocation, scores, n):
    return np.asarray(_counts(allocation, scores, jnp.asarray(n, jnp.int32)))


@pytest.mark.parametrize("amount", [0.25, 0.333, 1.0, 7, 1])
def test_a_budget_counts_the_floored_share_and_at_least_one(amount):
    lengths = np.arange(1, 200)
    if isinstance(amount, int):
        want = np.minimum(lengths, amount)
    else:
        want = [max(1, math.floor(round(amount * 1000) * int(t) / 1000)) for t in lengths]
    budget = Budget(amount)
    np.testing.assert_array_equal(budget.count(jnp.asarray(lengths)), want)
    assert [budget.capacity(int(t)) for t in lengths] == list(want)


@pytest.mark.parametrize("amount", [0, -1, 0.0, 1.5, -0.25, True, 2.0])
def test_budgets_that_mean_nothing_are_refused(amount):
    with pytest.raises(ValueError, match="budget must be a fraction"):
        Budget(amount)


def test_a_budget_of_more_slots_than_any_prompt_has_keeps_everything():
    huge = kvjax.method("snapkv", budget=10**20, window=4)
    assert huge.keep.budget.count(jnp.array([5, 9])).tolist() == [5, 9]


def test_uniform_gives_every_head_of_every_layer_n(rng):
    n = np.array([10, 7, 4])
    np.testing.assert_array_equal(counts(Uniform(), draw(rng), n), np.broadcast_to(n[:, None], (L, B, K)))


def flat_counts(scores, total):
    """How many of a group's `total` best scores fall to each of its lists; scores [lists, S]."""
    order = np.argsort(-scores, axis=None, kind="stable")[:total]
    return np.bincount(order // scores.shape[-1], minlength=len(scores))


@pytest.mark.parametrize("floor", sweep([0.0, 0.2, 0.5, 1.0], 0.2, 1.0))
def test_across_heads_blends_the_flat_ranking_with_a_floor_and_keeps_the_layer_total(rng, floor):
    scores, n = draw(rng), np.array([10, 7, 4])
    got = counts(AcrossHeads(floor), scores, n)
    np.testing.assert_array_equal(got.sum(-1), np.broadcast_to(K * n, (L, B)))
    assert (got >= np.floor(floor * n)[:, None]).all()
    for layer, row in np.ndindex(L, B):
        exact = (1 - floor) * flat_counts(np.asarray(scores)[layer, row], K * n[row]) + floor * n[row]
        assert (np.abs(got[layer, row] - exact) < 1).all()


def kvpress_heads(scores, n, alpha):
    """kvpress' AdaKV: each head's best int(alpha n) (at least 1) are safe, then the layer's lowest leave."""
    scores = np.array(scores, np.float64)
    safe = max(1, int(n * alpha)) if alpha > 0 else 0
    for head in scores:
        head[np.argsort(-head, kind="stable")[:safe]] = np.inf
    return flat_counts(scores, K * n)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.6])
@pytest.mark.parametrize("n", [[10, 7, 4], [2, 1, 3]])
def test_across_heads_without_blending_is_kvpress_adakv(rng, alpha, n):
    scores = draw(rng)
    got = counts(AcrossHeads(alpha, blend=False), scores, n)
    for layer, row in np.ndindex(L, B):
        live = np.asarray(scores)[layer, row, :, : LENGTHS[row]]
        np.testing.assert_array_equal(got[layer, row], kvpress_heads(live, n[row], alpha))


def test_across_heads_never_counts_empty_slots(rng):
    scores = np.array(draw(rng))
    scores[:, :, 1, 2:] = -np.inf  # a head that holds two tokens
    for blend in (True, False):
        got = counts(AcrossHeads(0.5, blend), jnp.asarray(scores), [10, 7, 4])
        assert (got[:, :, 1] <= 2).all()


def test_across_layers_keeps_the_best_of_the_whole_stack(rng):
    scores, n = draw(rng), np.array([10, 7, 4])
    got = counts(AcrossLayers(), scores, n)
    np.testing.assert_array_equal(got.sum((0, 2)), L * K * n)
    for row in range(B):
        want = flat_counts(np.asarray(scores)[:, row].reshape(L * K, S), L * K * n[row])
        np.testing.assert_array_equal(got[:, row].reshape(-1), want)


@pytest.mark.parametrize("layers", sweep([1, 5], 5))
@pytest.mark.parametrize(
    "n", sweep([[40, 31, 17], [20, 15, 8], [9, 6, 4], [3, 2, 1]], [40, 31, 17], [9, 6, 4])
)
def test_a_pyramid_falls_with_depth_around_its_mean_within_the_prompt(rng, layers, n):
    window, beta = 4, 20
    got = counts(Pyramid(beta, window), draw(rng, layers=layers), n)
    assert (got == got[..., :1]).all()
    per_layer, n = got[..., 0], np.array(n)
    np.testing.assert_array_equal(per_layer.sum(0), layers * n)
    assert (per_layer <= LENGTHS).all() and (per_layer >= np.minimum(n, window)).all()
    spare = np.maximum(n - window, 0)
    high = np.minimum(2 * spare - spare / beta, LENGTHS - window)
    share = np.linspace(high, 2 * spare - high, layers) if layers > 1 else spare[None]
    assert (np.abs(per_layer - share - np.minimum(n, window)) <= 1).all()


def kvpress_pyramid(length, kept, window, beta, layers):
    """kvpress' layer budgets around the real number `kept`; None where one lies at a half."""
    low = kept / beta
    high = 2 * kept - low
    if high >= length - window:
        high, low = length - window, 2 * kept - (length - window)
    if not length >= high >= low >= window:
        shares = [kept] * layers
    else:
        shares = [high - i * (high - low) / max(layers - 1, 1) for i in range(layers)]
    if any(abs(s % 1 - 0.5) < 1e-6 and s * 2 % 1 for s in shares):
        return None
    return [max(1, round(s)) for s in shares]


@pytest.mark.rotating
@pytest.mark.parametrize("layers", sweep([1, 30], 30))
def test_the_kvpress_pyramid_is_exact_at_any_length(rng, layers):
    ratios = [0.5, 0.25, 0.125, 0.9, 0.333, 0.05]
    checked = 0
    for ratio in ratios:
        lengths = rng.integers(20, [200, 5000, 131072]).tolist()
        n = [max(1, int(ratio * 1000 + 0.5) * t // 1000) for t in lengths]
        allocation = Pyramid(20, 8, "kvpress", Budget(ratio))
        off = allocation._floored_off(jnp.asarray(lengths), jnp.asarray(n))
        got = allocation._kvpress(jnp.asarray([n]), off[None], jnp.asarray([lengths]), layers)
        for i, length in enumerate(lengths):
            want = kvpress_pyramid(length, length * round(ratio * 1000) / 1000, 8, 20, layers)
            if want is not None:
                np.testing.assert_array_equal(got[:, i], want)
                checked += 1
    assert checked > len(ratios)


def test_the_kvpress_pyramid_reads_lengths_from_the_scores(rng):
    ratio = 0.5
    n = (LENGTHS * ratio).astype(int)
    got = counts(Pyramid(20, 4, "kvpress", Budget(ratio)), draw(rng), n)[..., 0]
    for row, length in enumerate(LENGTHS):
        np.testing.assert_array_equal(got[:, row], kvpress_pyramid(int(length), length * ratio, 4, 20, L))


ALLOCATIONS = [
    AcrossHeads(0.2),
    AcrossHeads(0.2, blend=False),
    AcrossLayers(),
    Pyramid(20, 4),
    Pyramid(2, 0),
    Pyramid(20, 4, "kvpress"),
]


@pytest.mark.parametrize("amount", sweep([0.5, 0.9, 0.25, 7, 30], 0.9))
@pytest.mark.parametrize("allocation", ALLOCATIONS, ids=str)
def test_what_rows_of_any_length_keep_fits_what_is_reserved(rng, allocation, amount):
    budget = Budget(amount)
    if isinstance(allocation, Pyramid):
        allocation = Pyramid(allocation.beta, allocation.window, allocation.variant, budget)
    lengths = np.arange(1, S + 1)
    kept = counts(allocation, draw(rng, lengths), budget.count(jnp.asarray(lengths)))
    reserved = np.array(allocation.layer_slots(budget.capacity(S), S, L, K))
    if allocation.across_layers:
        assert (kept.sum((0, 2)) <= reserved.sum()).all()
    else:
        assert (kept.sum(-1) <= reserved[:, None]).all()


def test_pool_pages_hold_any_split_of_the_slots_over_the_lists(rng):
    for _ in range(200):
        page, lists, slots = rng.integers(1, 9), rng.integers(1, 7), int(rng.integers(0, 60))
        split = rng.multinomial(slots, rng.dirichlet(np.ones(lists)))
        assert (-(-split // page)).sum() <= pool_pages(slots, int(lists), int(page))
