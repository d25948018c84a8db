"""Budgets per layer around any method: counts, kept tokens, and what cannot have them."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.compat.model_fit import check_budget
from kvjax.keep.budgets.budget import PerLayer
from tests.methods.golden import model


def prompt():
    return [np.random.default_rng(3).integers(0, 64, n).tolist() for n in (32, 21)]


def snapkv(budget=0.5):
    return kvjax.method("snapkv", budget=budget, window=2, kernel=3)


def kept(method):
    cache = kvjax.prefill(model("groups"), prompt(), method=method, room=4)[1]
    return cache, [[[set(p[p >= 0].tolist()) for p in row] for row in x] for x in kvjax.kept_positions(cache)]


@pytest.mark.rotating
def test_layers_keep_their_shares_and_the_best_tokens_of_each():
    _, plain = kept(snapkv())
    cache, mine = kept(kvjax.per_layer(snapkv(), [1, None, 0.5], page=4))
    assert mine[0] == plain[0]
    for b, row in enumerate(prompt()):
        n = len(row) // 2
        assert all(held == set(range(len(row))) for held in mine[1][b])
        assert [len(held) for held in mine[2][b]] == [n // 2] * 2
        assert all(few <= many for few, many in zip(mine[2][b], plain[2][b], strict=False))
    more, _ = kvjax.step(model("groups"), cache, [1, 2])
    assert np.isfinite(more).all()


@pytest.mark.parametrize("n", [[10, 7, 1], [4000, 999, 1001]])
def test_counts_are_the_floored_shares_of_the_budget_and_at_least_one(rng, n):
    shares, slots = (1, None, 0.25, 1.5), 8
    scores = rng.normal(size=(4, 3, 2, slots)).astype(np.float32)
    scores[:, 2, :, 3:] = -np.inf
    got = np.asarray(PerLayer(shares).counts(jnp.asarray(scores), jnp.asarray(n, jnp.int32)))
    for layer, row in np.ndindex(4, 3):
        live, share = (3 if row == 2 else slots), shares[layer]
        want = live if share is None else min(max(1, math.floor(share * n[row])), live)
        assert got[layer, row].tolist() == [want] * 2


def test_what_is_reserved_holds_what_is_kept(rng):
    allocation, lengths = PerLayer((0.3, None, 2)), np.arange(1, 41)
    scores = np.where(np.arange(40) < lengths[:, None, None], rng.normal(size=(3, 40, 2, 40)), -np.inf)
    n = jnp.asarray(np.maximum(lengths // 2, 1), jnp.int32)
    counts = allocation.counts(jnp.asarray(scores, jnp.float32), n)
    reserved = np.array(allocation.layer_slots(20, 40, 3, 2))
    assert (np.asarray(counts).sum(-1) <= reserved[:, None]).all()


def test_a_share_is_taken_of_any_number_of_slots():
    scores = jnp.zeros((1, 1, 1, 4), jnp.float32)
    assert PerLayer((8.0,)).counts(scores, jnp.asarray([2**28 - 1], jnp.int32)).tolist() == [[[4]]]


@pytest.mark.parametrize(
    ("method", "shares", "message"),
    [
        (dict(id="int8"), [1], "int8 selects no slots"),
        (dict(id="adakv", budget=0.5), [1], "adakv shares its budget by AcrossHeads already"),
        (
            dict(id="h2o", budget=0.5),
            [1],
            "h2o per layer: evicting while decoding works with the uniform allocation",
        ),
    ],
)
def test_what_has_no_budgets_per_layer_says_why(method, shares, message):
    with pytest.raises(InputError, match=message):
        kvjax.per_layer(kvjax.method(**method), shares)


@pytest.mark.parametrize("shares", [[], [0], [-1], [math.nan], [math.inf], [2000]])
def test_shares_that_mean_nothing_are_refused(shares):
    with pytest.raises(ValueError, match="shares must be one number from 0.001 to 1000"):
        kvjax.per_layer(snapkv(), shares)


def test_another_number_of_layers_and_a_window_beyond_a_share_are_refused_before_anything_runs():
    with pytest.raises(
        InputError, match="given 2 shares, .*, and the method selects in 3 layers of this model"
    ):
        kvjax.prefill(model("groups"), prompt(), method=kvjax.per_layer(snapkv(), [1, 1]), room=4)
    with pytest.raises(InputError, match="2 of .* must stay .* more than the budget of 1 slots"):
        kvjax.per_layer(snapkv(8), [1, 1, 0.1])


def test_what_does_not_fit_a_share_names_the_method_and_the_share():
    crowded = r"more than the budget of 1 slots in the layer of share 0\.25 of \(1, 0\.25\)"
    with pytest.raises(InputError, match=rf"^snapkv per layer: 4 of .*{crowded}"):
        kvjax.per_layer("snapkv(budget=4, window=4)", (1, 0.25))
    named = kvjax.per_layer("snapkv(budget=0.5, window=2)", (1, 0.25))
    with pytest.raises(InputError, match=rf"^per_layer\(snapkv\): 2 of 8 tokens .*{crowded}"):
        check_budget(named, [8])
