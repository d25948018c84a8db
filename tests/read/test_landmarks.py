"""Chunks by landmarks over keys that are rebuilt from few directions, with values in host memory."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.grammar import Budget
from kvjax.ops.base import memory
from kvjax.read.landmarks import Landmarks
from kvjax.state.cache import host_nbytes, nbytes
from kvjax.store.truncated import Truncated
from tests.float64.reads_by_index import shadowkv
from tests.float64.reference import Decoder, Prompt, Row
from tests.methods.battery import MAIN, B, off
from tests.methods.rows import THETA
from tests.read.test_persistent import model, quarter

HYPER = dict(rank=3, segment=8, chunk=2, outliers=2, newest=3)
NEAR, FAR = (kvjax.method("shadowkv", budget=0.25, **HYPER, **at) for at in ({}, dict(resident=0.0)))
TOKENS = np.random.default_rng(7).integers(0, 64, (9, B))


def talked(method, m, tokens=TOKENS):
    """Logits of a prompt and of steps in which a segment fills, and the cache after them."""
    logits, cache = kvjax.prefill(m, MAIN.first, method=method, room=12)
    found = [logits]
    for token in tokens:
        logits, cache = kvjax.step(m, cache, token)
        found.append(logits)
    return np.stack(found), cache


@pytest.fixture(scope="module")
def both():
    """Hold the same conversation over values on the device and in host memory."""
    m = model(layers=2)
    return m, talked(NEAR, m), talked(FAR, m)


@pytest.mark.rotating
def test_steps_read_outliers_and_the_best_landmarks_of_rebuilt_keys(both):
    m, (logits, _), _ = both
    seen, rows = [], []
    for tokens in MAIN.first:
        prompt, attends = Prompt(Decoder(m), tokens), shadowkv(quarter, **HYPER, theta=THETA, seen=seen)
        rows.append(Row(prompt, [np.ones((len(k), len(tokens)), bool) for k in prompt.k], attends=attends))
    for token, found in zip(TOKENS, logits[1:], strict=True):
        assert off(found, np.stack([r.step(t) for r, t in zip(rows, token, strict=True)])) < 3e-5
    # Two chunks are outliers; a segment fills while decoding.
    assert {old for _, old in seen} >= {8, 16, 24} and all(read < old for read, old in seen if old > 8)


@pytest.mark.rotating
def test_values_in_host_memory_change_no_number_and_keys_lie_on_the_device_in_few_directions(both):
    _, (want, near), (got, far) = both
    np.testing.assert_array_equal(want, got)
    (body,) = far.groups[-1].bodies
    assert memory.in_host(body.v) == memory.offers_host()
    assert host_nbytes(far) == (sum(nbytes(g.bodies[0].v) for g in far.groups) if memory.offers_host() else 0)
    assert nbytes(body.k) < 0.7 * nbytes(body.v)
    # The device holds what a step reads at most.
    assert body.near.slots.capacity == FAR.read.pages_visited(body.capacity) * HYPER["chunk"] < body.capacity
    assert nbytes(near.groups[-1].bodies[0].k) == nbytes(body.k)


@pytest.mark.rotating
def test_two_turns_and_taken_rows_are_those_of_the_device(both):
    m, *caches = both
    found = []
    for _, cache in caches:
        logits, cache = kvjax.prefill(m, MAIN.second, cache=kvjax.take_rows(cache, [1, 0, 2, 3]), room=4)
        found.append((logits, kvjax.step(m, cache, TOKENS[0])[0]))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])


@pytest.mark.rotating
def test_short_prompts_stay_as_computed():
    m, long = model(layers=2), kvjax.method("shadowkv", budget=1)
    (a, _), (b, _) = talked(long, m, TOKENS[:2]), talked(kvjax.method("full"), m, TOKENS[:2])
    assert off(a, b) < 1e-5


def test_all_singular_values_are_the_rows_and_few_are_the_nearest_of_that_rank(rng):
    x = rng.normal(size=(2, 3, 12, 5))
    for rank in (1, 3, 9):
        codec = Truncated(rank, 6)
        got = codec.decode(codec.encode(jnp.asarray(x, jnp.float32)), 5, jnp.float32)
        u, s, vt = np.linalg.svd(x.reshape(2, 3, 2, 6, 5), full_matrices=False)
        want = ((u * s[..., None, :])[..., :rank] @ vt[..., :rank, :]).reshape(x.shape)
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_what_does_not_fit_is_refused_with_the_sentence():
    with pytest.raises(ValueError, match="segment must be a multiple of chunk, which is 3, got 8"):
        kvjax.method("shadowkv", budget=0.5, segment=8, chunk=3)
    with pytest.raises(ValueError, match="rank of Truncated must be at least 1, got 0"):
        Truncated(0, 8)
    with pytest.raises(ValueError, match="at most one store"):
        kvjax.chain(NEAR, kvjax.method("int8"))
    assert Landmarks(Budget(0.25), page=2, outliers=50).pages_visited(16) == 8
