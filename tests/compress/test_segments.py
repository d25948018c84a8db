"""Segments with an encoded body and a plain tail: what lies where after a prompt, steps, a second turn."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.state.codes import encode

GROUP, RESIDUAL, ROOM = 8, 11, 40


@pytest.fixture(scope="module")
def model():
    config = Config(vocab=64, d_model=32, layers=1, heads=4, kv_heads=2, head_dim=8, d_ff=48)
    return Model(config, init(config, jax.random.key(0)))


def split_of(cache):
    (body,), tail = cache.groups[0].bodies, cache.groups[0].tail
    return jax.device_get((body, tail, body.keys(), tail.keys()))


@jax.jit(static_argnames="codec")
def coded(x, codec):
    """One granule of tokens, encoded and decoded again."""
    return encode(x, codec).decode()


def check_split(cache, full):
    """Of one layer, whose keys and values depend on the tokens alone: full holds them as computed."""
    body, tail, body_keys, tail_keys = split_of(cache)
    method = cache.method.store
    rows = jax.device_get(full.groups[0].tail)
    for b in range(len(cache.next)):
        count = int(cache.next[b])
        moved = max(count - RESIDUAL, 0) // GROUP * GROUP
        for h in range(body.pos.shape[2]):
            held, kept = body.pos[0, b, h], tail.pos[0, b, h]
            # Whole granules of the oldest tokens lie encoded in order, at least RESIDUAL newest ones do not.
            np.testing.assert_array_equal(held[held >= 0], np.arange(moved))
            np.testing.assert_array_equal(kept[kept >= 0], np.arange(moved, count))
            assert len(kept) == RESIDUAL + GROUP
            for mine, plain, codec in (("k", rows.k, method.keys), ("v", rows.v, method.values)):
                exact = plain[0, b, h, :count]
                np.testing.assert_allclose(
                    getattr(tail_keys, mine)[0, b, h, : count - moved], exact[moved:], rtol=1e-5, atol=1e-6
                )
                pieces = [coded(x, codec) for x in exact[:moved].reshape(-1, GROUP, exact.shape[-1])]
                once = np.concatenate(pieces) if pieces else exact[:0]
                np.testing.assert_allclose(
                    getattr(body_keys, mine)[0, b, h, :moved], once, rtol=1e-3, atol=1e-3
                )


@pytest.mark.rotating
def test_the_newest_tokens_stay_exact_and_older_ones_are_encoded_once_in_whole_granules(model):
    rng = np.random.default_rng(0)
    lengths = [26, 19, 9]
    method = kvjax.method("kivi", bits=4, group=GROUP, residual=RESIDUAL)
    first = [rng.integers(0, 64, n).tolist() for n in lengths]
    second = [rng.integers(0, 64, n).tolist() for n in (3, 17, 8)]
    _, cache = kvjax.prefill(model, first, method=method, room=ROOM)
    _, full = kvjax.prefill(model, first, room=ROOM)
    check_split(cache, full)
    for token in rng.integers(0, 64, (10, 3)):
        _, cache = kvjax.step(model, cache, token)
        _, full = kvjax.step(model, full, token)
        check_split(cache, full)
    _, cache = kvjax.prefill(model, second, cache=cache, room=8)
    _, full = kvjax.prefill(model, second, cache=full, room=8)
    check_split(cache, full)


@pytest.mark.rotating
def test_quest_summarises_exactly_the_keys_of_each_page(model):
    rng = np.random.default_rng(0)
    method = kvjax.method("quest", budget=0.5, page=GROUP, skip_layers=0)
    _, cache = kvjax.prefill(
        model, [rng.integers(0, 64, n).tolist() for n in (30, 17)], method=method, room=ROOM
    )
    for token in rng.integers(0, 64, (9, 2)):
        _, cache = kvjax.step(model, cache, token)
    body, tail, keys, _ = split_of(cache)
    for b, h in np.ndindex(body.pos.shape[1:3]):
        pages = (body.pos[0, b, h] >= 0).sum() // GROUP
        assert pages == cache.next[b] // GROUP and (tail.pos[0, b, h] >= 0).sum() == cache.next[b] % GROUP
        k = keys.k[0, b, h, : pages * GROUP].reshape(pages, GROUP, -1)
        np.testing.assert_array_equal(body.summary["low"][0, b, h, :pages], k.min(1))
        np.testing.assert_array_equal(body.summary["high"][0, b, h, :pages], k.max(1))


@pytest.mark.rotating
def test_a_split_cache_says_that_it_is_full_before_it_loses_a_token(model):
    tokens = np.random.default_rng(0).integers(0, 64, 80).tolist()
    method = kvjax.method("kivi", bits=4, group=GROUP, residual=RESIDUAL)
    _, cache = kvjax.prefill(model, [tokens[:20]], method=method, room=6)
    taken = 20
    with pytest.raises(kvjax.InputError, match="full"):
        for token in tokens[20:]:
            _, cache = kvjax.step(model, cache, [token])
            taken += 1
            for pos in np.asarray(kvjax.kept_positions(cache)[0])[0]:
                assert set(pos[pos >= 0].tolist()) == set(range(taken))
    assert taken >= 26
    _, cache = kvjax.prefill(model, [tokens[taken : taken + 5]], cache=cache, room=4)
    for pos in np.asarray(kvjax.kept_positions(cache)[0])[0]:
        assert set(pos[pos >= 0].tolist()) == set(range(taken + 5))
