"""Queries that pick the tokens they attend to: by the indexer's equation, some at a time, and by position."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models import attending_picked
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.models.picking import Picking, all_of, picked
from kvjax.ops.attention.union import Keys
from tests.methods.method_pairs import exact
from tests.models.architectures import INDEXED, with_layers

PICKS = dataclasses.replace(INDEXED, index_heads=6, index_top=7)
CONFIG = with_layers(PICKS, dataclasses.replace(PICKS, index_source=0), mlps=())
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 40)).astype(np.int32)


@pytest.fixture(scope="module")
def model():
    return Model(CONFIG, init(CONFIG, jax.random.key(1)))


def a_set(rng, pos):
    pos = np.asarray(pos, np.int32)[None, None]
    keys = rng.normal(size=(1, 1, pos.shape[-1], 5)).astype(np.float32)
    return Keys(jnp.asarray(keys), jnp.asarray(keys), jnp.asarray(pos))


@pytest.mark.rotating
def test_the_best_by_the_equation_are_picked():
    """I(t, s) = sum_h w_th relu(q_th k_s) in float64, k from the third channel on, of visible slots."""
    rng = np.random.default_rng(3)
    sets = [a_set(rng, [4, -1, 0, 2]), a_set(rng, [9, 5, 6])]
    q, w = rng.normal(size=(1, 2, 3, 3)), rng.normal(size=(1, 2, 3))
    asked = jnp.asarray([[6, 1]])
    how = Picking(2, jnp.asarray(q, jnp.float32), jnp.asarray(w, jnp.float32), first=2)
    seen, positions = picked(how, sets, asked)
    k, pos = (np.concatenate([np.asarray(getattr(s, n))[0, 0] for s in sets]) for n in ("k", "pos"))
    for t, at in enumerate((6, 1)):
        score = (w[0, t] * np.maximum(k[:, 2:].astype(float) @ q[0, t].T, 0)).sum(-1)
        order = [i for i in np.argsort(-score) if 0 <= pos[i] <= at][:2]
        found = np.concatenate([np.asarray(s)[0, t] for s in seen])
        assert {*np.flatnonzero(found)} == {*order}
        assert sorted(p for p in np.asarray(positions)[0, t] if p >= 0) == sorted(pos[order])


def test_of_equal_scores_the_older_tokens_are_picked_wherever_they_lie():
    rng = np.random.default_rng(5)
    pos, score = np.array([7, -1, 0, 2, 9, 5, 6, 1]), np.array([-1, 3, -2, 0, 2, 0, -3, -1])
    for order in ([*range(8)], rng.permutation(8), rng.permutation(8)):
        keys = jnp.asarray(score[order], jnp.float32)[None, None, :, None]
        sets = [Keys(keys[:, :, part], keys[:, :, part], jnp.asarray(pos[order], jnp.int32)[None, None, part])
                for part in (slice(0, 3), slice(3, 8))]  # fmt: skip
        for count, want in ((1, [9]), (3, [0, 1, 9]), (5, [0, 1, 2, 5, 9])):
            how = Picking(count, jnp.ones((1, 1, 1, 1)), jnp.ones((1, 1, 1)))
            seen, found = picked(how, sets, jnp.asarray([[9]]))
            assert np.asarray(found)[0, 0].tolist() == want
            assert sorted(pos[order][np.concatenate([np.asarray(s)[0, 0] for s in seen])].tolist()) == want


@pytest.mark.rotating
def test_first_tokens_apart_are_picked_as_from_one_pass_where_scores_tie():
    """With two heads relu leaves nothing of many scores, so more tokens tie than a query picks."""
    two = dataclasses.replace(PICKS, index_heads=2)
    config = with_layers(two, two, mlps=())
    model = Model(config, init(config, jax.random.key(3)))
    whole = np.asarray(model(TOKENS))
    logits, cache = kvjax.prefill(model, TOKENS[:, :30], method=exact(sinks=2), room=10)
    for t in range(30, 40):
        np.testing.assert_allclose(logits, whole[:, t - 1], atol=1e-4)
        logits, cache = kvjax.step(model, cache, TOKENS[:, t])


@pytest.mark.parametrize("chunk", [None, 8])
def test_a_window_hides_tokens_from_those_that_pick(chunk):
    """A step over a cache, which holds the window alone, picks what one pass over the whole text does."""
    config = with_layers(PICKS, dataclasses.replace(PICKS, index_source=0), mlps=(), windows=(11, 11))
    model = Model(config, init(config, jax.random.key(1)))
    whole = np.asarray(model(TOKENS))
    logits, cache = kvjax.prefill(model, TOKENS[:, :30], room=10, chunk=chunk)
    for t in range(30, 34):
        np.testing.assert_allclose(logits, whole[:, t - 1], atol=1e-4)
        logits, cache = kvjax.step(model, cache, TOKENS[:, t])


def test_picked_tokens_of_another_window_are_refused():
    with pytest.raises(
        ValueError, match="takes the tokens that layer 0 picks, and their windows are None and 6"
    ):
        with_layers(PICKS, dataclasses.replace(PICKS, index_source=0), windows=(6, None))


def test_a_layer_takes_picked_tokens_by_their_positions():
    rng = np.random.default_rng(4)
    sets = [a_set(rng, [4, -1, 0, 2]), a_set(rng, [9, 5, 6])]
    taken = jnp.asarray([[[-1, 2, 9], [-1, -1, 6]]])
    seen, positions = picked(Picking(3, taken=taken), sets, jnp.asarray([[9, 9]]))
    assert np.asarray(seen[0])[0].tolist() == [[False, False, False, True], [False] * 4]
    assert np.asarray(seen[1])[0].tolist() == [[True, False, False], [False, False, True]]
    assert positions is taken
    everything = all_of([s.pos for s in sets], 2)
    assert np.asarray(everything).tolist() == [[[-1, 0, 2, 4, 5, 6, 9]]] * 2
    seen, _ = picked(Picking(3, taken=everything[:1]), sets, jnp.asarray([[9, 9]]))
    assert np.asarray(seen[0])[0].tolist() == [[True, False, True, True]] * 2


@pytest.mark.rotating
def test_queries_some_at_a_time_attend_as_all_at_once(model, monkeypatch):
    whole = np.asarray(model(TOKENS))
    monkeypatch.setattr(attending_picked, "QUERIES", 16)
    jax.clear_caches()
    np.testing.assert_allclose(model(TOKENS), whole, atol=1e-5)
    jax.clear_caches()


@pytest.mark.rotating
def test_what_is_picked_matters_and_what_fits_is_not_picked(model):
    wide = dataclasses.replace(PICKS, index_top=40)
    everything = with_layers(wide, dataclasses.replace(wide, index_source=0), mlps=())
    of_all = Model(everything, model.params)(TOKENS)
    apart = np.abs(np.asarray(of_all) - np.asarray(model(TOKENS))).max((0, 2))
    assert apart[:7].max() < 1e-5 and apart[7:].min() > 1e-3


# All tokens stay under these, in pages, as codes and with keys that turn when they are read.
@pytest.mark.rotating
@pytest.mark.parametrize("method", ["full", "adakv(budget=64)", "streamingllm(budget=64)", "h2o(budget=64)"])
def test_steps_pick_what_one_pass_does(method, model):
    whole = np.asarray(model(TOKENS))
    logits, cache = kvjax.prefill(model, TOKENS[:, :30], method=method, room=10)
    np.testing.assert_allclose(logits, whole[:, 29], atol=1e-4)
    for t in range(30, 33):
        logits, cache = kvjax.step(model, cache, TOKENS[:, t])
        np.testing.assert_allclose(logits, whole[:, t], atol=1e-4)
