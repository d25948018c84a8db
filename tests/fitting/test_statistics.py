"""What is fitted of queries, keys and heads, against float64 numpy on the same texts."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.fitting.loops.whole import check_whole
from kvjax.fitting.statistics.curves import best_shares, curves
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.models.stacking import Group
from tests.float64.reference import Prompt, rope, softmax
from tests.methods.battery import MAIN, decoder, model, prompt_of

ROWS = MAIN.first


def prompts():
    return [prompt_of("4/2", "main", b) for b in range(len(ROWS))]


def test_centres_are_the_mean_query_and_the_mean_lengths_of_its_pairs():
    found = kvjax.fit(model("4/2"), "triattention", ROWS, batch=4).arrays
    for layer in range(2):
        q = np.concatenate([p.raw_q[layer] for p in prompts()], 1)
        np.testing.assert_allclose(found["mean"][layer], q.mean(1), atol=1e-5)
        sizes = np.abs(q[..., :8] + 1j * q[..., 8:])
        np.testing.assert_allclose(found["size"][layer], sizes.mean(1), rtol=1e-5)


@pytest.mark.rotating
def test_norms_are_those_of_the_rotated_queries_of_a_group():
    found = kvjax.fit(model("4/2"), "think", ROWS, batch=4).arrays["norms"]
    for layer in range(2):
        q = np.concatenate([p.q[layer] for p in prompts()], 1)
        square = (q**2).mean(1).reshape(2, 2, -1).sum(1)
        np.testing.assert_allclose(found[layer], np.sqrt(square), rtol=1e-5)


def keys_by_blocks(tokens, size, sinks):
    """Rotated keys of all layers where tokens see their block, half of the one before and the first ones."""
    d, pos = decoder("4/2"), np.arange(len(tokens))
    x, found = d.rest["embed"][np.asarray(tokens)], []
    sees = (pos[None] >= (pos // size * size - size // 2)[:, None]) | (pos[None] < sinks)
    for layer in d.layers:
        q, k, v = d.project(layer, x)
        q, k = rope(q, pos, d.config.rope.theta), rope(k, pos, d.config.rope.theta)
        found.append(k)
        s = q @ np.repeat(k, 2, 0).swapaxes(1, 2) / np.sqrt(k.shape[-1])
        p = softmax(np.where((pos[None] > pos[:, None]) | ~sees, -np.inf, s))
        x = d.finish(layer, x, p @ np.repeat(v, 2, 0))
    return found


@pytest.mark.rotating
def test_layers_are_important_whose_keys_drift_most_under_reading_by_blocks():
    m = model("4/2")
    found = kvjax.fit(m, "epicache", ROWS, batch=4, tokens=6, sinks=1, power=2.0).arrays["importance"]
    like = np.zeros(2)
    for p in prompts():
        for layer, k in enumerate(keys_by_blocks(p.tokens, 6, 1)):
            cut = [np.s_[:, at : at + 6] for at in range(0, p.length, 6)]
            pairs = [(k[c].reshape(2, -1), p.k[layer][c].reshape(2, -1)) for c in cut]
            like[layer] += np.mean(
                [(a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1) for a, b in pairs]
            ) / len(ROWS)
    # Of two layers the one that drifts more has all; the other none.
    assert abs(like[0] - like[1]) > 1e-4
    np.testing.assert_allclose(found, np.repeat((like == like.min())[:, None], 2, 1), atol=1e-6)
    with pytest.raises(InputError, match="no text has more than 99 tokens, expected some"):
        kvjax.fit(m, "epicache", ROWS, tokens=99)


def test_shares_of_heads_are_those_of_the_most_worth_among_all():
    """Against every way to share 4, 8 and 12 of 16 quarters among heads of concave curves."""
    rng = np.random.default_rng(4)
    gains = -np.sort(-rng.exponential(size=(4, 4)), -1)
    worth = np.stack(
        [np.interp(np.arange(101), np.arange(0, 101, 25), np.r_[0, np.cumsum(g)]) for g in gains]
    )
    kept = best_shares(worth.reshape(2, 2, 101)).reshape(4, 99)
    for many in (4, 8, 12):
        ways = [w for w in np.ndindex(5, 5, 5, 5) if sum(w) == many]
        best = max(ways, key=lambda w: sum(worth[h, 25 * x] for h, x in enumerate(w)))
        np.testing.assert_allclose(kept[:, 100 - 100 * many // 16 - 1], np.array(best) / 4, atol=0.011)


@pytest.mark.rotating
def test_a_curve_is_what_later_tokens_give_the_best_by_score():
    m, rng = model("4/2"), np.random.default_rng(5)
    row = rng.integers(0, 64, 120).tolist()
    found = kvjax.fit(m, kvjax.method("lukv", budget=0.5, future=64), [row]).arrays["kept"]
    whole, half = Prompt(decoder("4/2"), row), Prompt(decoder("4/2"), row[:60])
    from tests.methods.expected import expected_score

    score, good = [], []
    for layer, p in enumerate(whole.p):
        size = np.linalg.norm(half.v[layer], axis=-1)
        score.append(expected_score(half, layer, future=64) + 0.02 * size)
        good.append(p[:, 60:, :60].mean(1).reshape(2, 2, 60).mean(1))
    want = best_shares(curves(np.stack(score), np.stack(good)))
    # Near ties in score or worth may fall the other way.
    assert np.abs(found - want).mean() < 2e-3 and found.shape == (2, 2, 99)
    np.testing.assert_allclose(found.sum((0, 1)), 4 * np.arange(99, 0, -1) / 100, atol=1e-5)


def test_layers_stacked_as_a_pattern_are_refused_where_arrays_are_in_the_order_of_groups():
    config = dataclasses.replace(model("4/2").config, layers=4)
    turns = Model(config, init(config, jax.random.key(0))).regrouped((Group(0, 2, 2), Group(1, 2, 2)))
    with pytest.raises(InputError, match="stacked in their order: give model.in_runs"):
        check_whole(turns, "gates")
    check_whole(turns.in_runs(), "gates")
