"""Slots of ops: where tokens go, who sees them, and softmax over what is seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.attention import token_cache as cache
from kvjax.ops.base.dtypes import wide
from tests.ops.oracles import rms

# Two rows; * opens a segment, - is padding: row 0 is a b* c - d*, row 1 is - a b* - -.
REAL = jnp.asarray([[1, 1, 1, 0, 1], [0, 1, 1, 0, 0]], bool)
SEGMENTS = jnp.asarray([[4, 7, 7, 7, 4], [0, 0, 1, 1, 1]], jnp.int32)
append = jax.jit(cache.append, static_argnums=4)
seen = jax.jit(cache.seen, static_argnames="window")
NEW = {"x": jnp.arange(1.0, 11.0).reshape(2, 5, 1)}


@pytest.mark.rotating
def test_real_tokens_take_slots_in_order():
    slots, at = append(NEW, None, SEGMENTS, REAL, None)
    assert at.slot.tolist() == [[0, 1, 2, 2, 3], [-1, 0, 1, 1, 1]]
    assert at.first.tolist() == [[0, 1, 1, 1, 3], [0, 0, 1, 1, 1]]
    assert slots.kept["x"][..., 0].tolist() == [[1, 2, 3, 5, 0], [7, 8, 0, 0, 0]]
    assert slots.count.tolist() == [4, 2] and slots.start.tolist() == [3, 1]


def test_the_first_token_continues_what_was_before():
    before, _ = append(NEW, None, SEGMENTS, REAL, None)
    slots, at = append(NEW, before, None, None, None)
    assert slots.capacity == 10 and slots.count.tolist() == [9, 7]
    assert slots.kept["x"][1, :, 0].tolist() == [7, 8, 6, 7, 8, 9, 10, 0, 0, 0]
    assert at.first.tolist() == [[3] * 5, [1] * 5]


def test_tokens_see_their_segment_up_to_themselves():
    slots, at = append(NEW, None, SEGMENTS, REAL, None)
    want = np.zeros((2, 5, 5), bool)
    for row, token, keys in [(0, 0, [0]), (0, 1, [1]), (0, 2, [1, 2]), (0, 3, [1, 2]), (0, 4, [3]),
                             (1, 1, [0]), (1, 2, [1]), (1, 3, [1]), (1, 4, [1])]:  # fmt: skip
        want[row, token, keys] = True
    got = seen(at, cache.stored(slots))
    np.testing.assert_array_equal(got[:, 0], want)
    narrow = seen(at, cache.stored(slots), window=1)
    np.testing.assert_array_equal(narrow.sum(-1)[:, 0], [[1] * 5, [0, 1, 1, 1, 1]])


def test_before_they_are_put_tokens_are_seen_behind_the_slots():

    @jax.jit
    def run():
        empty = cache.room(NEW, None, 7)
        at = cache.places(empty, *cache.marks(NEW["x"], SEGMENTS, REAL))
        full = cache.put(empty, NEW, at)
        return at, cache.seen_arriving(empty, at), cache.seen(at, cache.stored(full))

    at, got, by_slot = jax.device_get(run())
    assert not got[..., :7].any()
    for row, token in zip(*np.nonzero(REAL), strict=True):
        np.testing.assert_array_equal(got[row, 0, :, 7 + token], by_slot[row, 0, :, at.slot[row, token]])
    assert not got[..., 7:][~np.broadcast_to(REAL[:, None, None], (2, 1, 5, 5))].any()


def test_a_token_without_room_is_dropped():
    slots, at = append(NEW, None, None, None, 3)
    assert slots.kept["x"][0, :, 0].tolist() == [1, 2, 3] and slots.count.tolist() == [5, 5]
    out = cache.checked(jnp.ones((2, 5, 1, 1)), at.slot[..., None], slots.capacity)
    assert np.isnan(out[0, :, 0, 0]).tolist() == [False, False, False, True, True]


def test_less_room_than_before_is_refused():
    before, _ = append(NEW, None, None, None, None)
    with pytest.raises(ValueError, match="capacity is 4 slots, but initial_state has 5"):
        append(NEW, before, None, None, 4)


def test_softmax_of_what_is_seen_is_exact_and_of_nothing_is_nothing(rng):
    scores = 3000 * rng.normal(size=(2, 3, 4, 6))  # beyond the range of exp where they are not seen
    visible = rng.random((2, 1, 4, 6)) < 0.5
    visible[:, :, 0], visible[..., 1:, 0] = False, True
    top = np.where(visible, scores, -np.inf).max(-1, keepdims=True, initial=-1e9)
    weights = np.where(visible, np.exp(np.where(visible, scores - top, 0)), 0)
    want = weights / np.maximum(weights.sum(-1, keepdims=True), 1)
    with jax.enable_x64(True):
        x, seen = jnp.asarray(scores), jnp.asarray(visible)
        p, lse = (np.asarray(y) for y in jax.jit(cache.softmax)(x, seen))
        grad = jax.jit(jax.grad(lambda x: (cache.softmax(x, seen)[0] ** 2).sum()))(x)
        of_lse = jax.jit(jax.grad(lambda x: cache.softmax(x, seen)[1][:, :, 1:].sum()))(x)
    assert p.dtype == np.float64 and rms(p, want) < 1e-10 and (p[:, :, 0] == 0).all()
    assert np.isneginf(lse[:, :, 0]).all()
    assert rms(lse[:, :, 1:], np.log(weights[:, :, 1:].sum(-1)) + top[:, :, 1:, 0]) < 1e-10
    assert np.isfinite(grad).all() and rms(of_lse, want) < 1e-10


def test_query_heads_share_the_keys_of_their_group(rng):
    q, k, v = (rng.normal(size=(2, s, n, d)) for s, n, d in ((3, 4, 5), (6, 2, 5), (6, 2, 7)))
    s = cache.products(*(jnp.asarray(x, jnp.float32) for x in (q, k)))
    out = cache.mix(s, jnp.asarray(v, jnp.float32))
    k, v = (np.repeat(x, 2, axis=2) for x in (k, v))
    want = np.einsum("btnk,bsnk->bnts", q, k)
    assert rms(s, want) < 1e-6 and rms(out, np.einsum("bnts,bsnv->btnv", want, v)) < 1e-6


@pytest.mark.rotating
@pytest.mark.parametrize("t", [1, 4, 5, 8, 11])
def test_chunks_of_any_length_are_one_scan(t):
    x = jnp.arange(1.0, 1.0 + 2 * t).reshape(2, t)
    real = jnp.ones((2, t), bool)

    def body(total, tokens):
        x, real = tokens
        sums = total[:, None] + jnp.cumsum(jnp.where(real, x, 0), 1)
        return sums[:, -1], sums

    out, last = cache.by_chunks(body, jnp.zeros(2), (x, real), 4)
    np.testing.assert_array_equal(out, np.cumsum(x, 1))
    np.testing.assert_array_equal(last, np.sum(x, 1))


def test_the_working_dtype_is_at_least_float32():
    half = jnp.zeros(1, jnp.bfloat16)
    assert wide(half) == np.float32 and wide(half, half.astype(jnp.float16)) == np.float32
    with jax.enable_x64(True):
        assert wide(half, jnp.zeros(1, jnp.float64)) == np.float64
