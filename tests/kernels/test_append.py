"""Appending in place: each form against numpy, bit by bit, with lists that write nothing."""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.decode.append import append, tpu_append
from kvjax.ops.decode.page_pool import make_pool
from kvjax.ops.decode.paged_append import paged_append, tpu_paged_append
from kvjax.ops.decode.paged_decode import paged_decode
from kvjax.pallas_kernels.append import tiles, words_tpu
from tests.kernels.close import check, with_races
from tests.sweep import sweep

B, K, LAYERS, PAGES, M, ABSURD = 2, 3, 2, 9, 2, 10**6
PAYLOADS = {
    "float32": (jnp.float32, 16),
    "bfloat16": (jnp.bfloat16, 16),
    "int8": (jnp.int8, 128),
    "int4": (jnp.int4, 128),
    "uint2": (jnp.uint2, 128),
    "e5m2": (jnp.float8_e5m2, 128),
}
NAMES = ("pos", "key_scale", "value_scale")


def exactly(x):
    return np.asarray(x.astype(jnp.float32))


def draw(seed, payload, *, rows, packed=False):
    """(pool, table, lengths, active, k, v, side): one list is full, one not active, four write."""
    rng = np.random.default_rng(seed)
    dtype, page = PAYLOADS[payload]
    page = 128 if rows else page
    whole, low = "int" in payload, 0 if payload == "uint2" else -8

    def numbers(*shape):
        shape = (*shape[:-1], shape[-1] // (2 if packed else 1))
        x = rng.integers(low, 4 + low // 2 * -1, shape) if whole else rng.standard_normal(shape)
        return jnp.asarray(x).astype(dtype)

    side = {n: jnp.asarray(rng.standard_normal((LAYERS, PAGES, page)), jnp.float32) for n in NAMES if rows}
    pool = make_pool(
        numbers(LAYERS, PAGES, page, 128), numbers(LAYERS, PAGES, page, 128), packed=packed, **side
    )
    lengths = np.array([[0, page, 2 * page - 1], [5, page + 3, 2 * page]])
    active = np.array([[True, True, True], [True, False, True]])
    # What writes nothing may name any page, also one that others write into.
    table = np.full((B, K, M), ABSURD)
    order = iter(rng.permutation(PAGES))
    for b, k in np.ndindex(B, K):
        if lengths[b, k] < M * page and active[b, k]:
            table[b, k, lengths[b, k] // page] = next(order)
    table[1, 1] = table[0, 0, 0]
    given = {n: jnp.asarray(rng.standard_normal((B, K)), jnp.float32) for n in NAMES} if rows else None
    k, v = numbers(B, K, 128), numbers(B, K, 128)
    return pool, *map(jnp.asarray, (table, lengths, active)), k, v, given


def by_hand(pool, table, lengths, active, k, v, side):
    """(keys, values, numbers) with layer 1 written into."""
    keys, values, page = exactly(pool.keys).copy(), exactly(pool.values).copy(), pool.page
    rows = {n: np.array(pool.number(n)) for n in pool.names}
    for b, h in np.ndindex(B, K):
        length = int(lengths[b, h])
        if not active[b, h] or length >= M * page:
            continue
        at = table[b, h, length // page]
        keys[1, at, length % page], values[1, at, length % page] = exactly(k)[b, h], exactly(v)[b, h]
        for name, x in rows.items():
            x[1, at, length % page] = side[name][b, h]
    return keys, values, rows


POOLS = list(itertools.product([*PAYLOADS, "bfloat16, packed", "uint2, packed"], [False, True]))
ALWAYS = [("bfloat16, packed", True), ("int4", True)]


@pytest.mark.rotating
@pytest.mark.parametrize("payload, rows", sweep(POOLS, *ALWAYS))
def test_one_slot_of_every_active_list_changes_and_nothing_else(payload, rows):
    payload, _, packed = payload.partition(", ")
    pool, table, lengths, active, k, v, side = draw(0, payload, rows=rows, packed=bool(packed))
    keys, values, want = by_hand(pool, table, lengths, active, k, v, side)
    if payload == "uint2" and rows:
        k, v = k.astype(jnp.uint8), v.astype(jnp.uint8)
    for form in ("reference", "tpu interpret", "gpu interpret"):
        call = partial(paged_append, numbers=side, active=active, implementation=form)
        got = jax.jit(call, donate_argnums=0)(jax.tree.map(jnp.copy, pool), table, lengths, k, v, 1)
        np.testing.assert_array_equal(exactly(got.keys), keys)
        np.testing.assert_array_equal(exactly(got.values), values)
        for name, x in want.items():
            np.testing.assert_array_equal(np.asarray(got.number(name)), x)


@pytest.mark.rotating
def test_rows_narrower_than_a_power_of_two_have_nothing_written_beside_them():
    rng = np.random.default_rng(4)
    pages = jnp.asarray(rng.standard_normal((LAYERS, PAGES, 64, 24)), jnp.bfloat16)
    pool = make_pool(pages, pages, pos=jnp.zeros((LAYERS, PAGES, 64)))
    table, lengths = jnp.asarray(rng.permutation(PAGES)[: B * M].reshape(B, 1, M)), jnp.asarray([[50], [127]])
    k, v = jnp.asarray(rng.standard_normal((2, B, 1, 24)), jnp.bfloat16)
    got = paged_append(
        pool, table, lengths, k, v, 1, numbers={"pos": jnp.asarray([[50.0], [127.0]])},
        implementation="gpu interpret",
    )  # fmt: skip
    keys, numbers = exactly(pages).copy(), np.zeros((LAYERS, PAGES, 64))
    for b, at in ((0, 50), (1, 127)):
        keys[1, table[b, 0, at // 64], at % 64] = exactly(k)[b, 0]
        numbers[1, table[b, 0, at // 64], at % 64] = at
    np.testing.assert_array_equal(exactly(got.keys), keys)
    np.testing.assert_array_equal(np.asarray(got.number("pos")), numbers)


@pytest.mark.parametrize("dma", sweep(["on_wait", "eager"], "eager"))
def test_tiles_have_arrived_before_they_change_and_are_back_before_it_ends(dma, monkeypatch):
    monkeypatch.setattr("kvjax.ops.decode.append.CHUNK", 4)
    rng = np.random.default_rng(1)
    pools = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((5, 2, 16, 128), (5, 3, 128))]
    new = [jnp.asarray(rng.standard_normal((5, *x.shape[1:2], *x.shape[3:])), jnp.float32) for x in pools]
    block, slot = jnp.asarray([4, 0, 0, 2, 1]), jnp.asarray([15, 3, -1, 0, 9])
    want = [np.asarray(x).copy() for x in pools]
    for x, y in zip(want, new, strict=True):
        for i in (0, 1, 3, 4):
            x[int(block[i]), :, int(slot[i])] = y[i]

    def call(mode):
        return jax.jit(partial(tpu_append, interpret=mode))(pools, new, block, slot)

    got, races = with_races(call, dma)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
    assert not races
    monkeypatch.setattr(tiles, "wait", lambda copy: None)
    assert dma == "on_wait" or with_races(call, dma)[1]


@pytest.mark.rotating
@pytest.mark.parametrize("dma", sweep(["on_wait", "eager"], "eager"))
def test_tokens_of_pages_do_not_race_either(dma, monkeypatch):
    monkeypatch.setattr(words_tpu, "LISTS", 4)
    pool, table, lengths, active, k, v, side = draw(3, "int8", rows=True)
    keys, values, want = by_hand(pool, table, lengths, active, k, v, side)
    writes = jnp.where(active, lengths, -1)
    numbers = [side[n] for n in NAMES]

    def call(mode):
        return [jax.jit(partial(tpu_paged_append, interpret=mode))(pool, table, writes, k, v, 1, numbers)]

    (words,), races = with_races(call, dma)
    got = dataclasses.replace(pool, words=jnp.asarray(words, jnp.int32))
    np.testing.assert_array_equal(exactly(got.keys), keys)
    np.testing.assert_array_equal(exactly(got.values), values)
    for name, x in want.items():
        np.testing.assert_array_equal(np.asarray(got.number(name)), x)
    assert not races
    monkeypatch.setattr(tiles, "wait", lambda copy: None)
    assert dma == "on_wait" or with_races(call, dma)[1]


@pytest.mark.rotating
def test_what_was_appended_is_decoded():
    """Tokens appended one by one, then read by paged decoding, against attention over them in numpy."""
    rng = np.random.default_rng(2)
    t, page = 20, 16
    x = rng.standard_normal((2, t, B, K, 128))
    q = rng.standard_normal((B, K, 1, 128))
    table = jnp.asarray(rng.permutation(2 * B * K).reshape(B, K, 2))
    empty = jnp.full((1, 2 * B * K, page, 128), jnp.nan)
    pool = make_pool(empty, empty)

    def token(pool, now):
        at, k, v = now
        lengths = jnp.full((B, K), at)
        return paged_append(pool, table, lengths, k, v), None

    keys, values = (jnp.asarray(y, jnp.float32) for y in x)
    pool, _ = jax.jit(lambda p: jax.lax.scan(token, p, (jnp.arange(t), keys, values)))(pool)
    lengths, pos = jnp.full((B, K), t), jnp.full((B, 1), t)
    out, _, _ = paged_decode(jnp.asarray(q, jnp.float32), pool, table, lengths, pos, scale=0.1)
    z = np.einsum("bkth,sbkh->bkts", q, x[0]) * 0.1
    p = np.exp(z - z.max(-1, keepdims=True))
    want = np.einsum("bkts,sbkh->bkth", p / p.sum(-1, keepdims=True), x[1])
    check([out], [want], 2e-6)


def test_what_cannot_run_says_why():
    pool, table, lengths, active, k, v, side = draw(0, "int8", rows=True)
    with pytest.raises(
        ValueError, match="numbers given for none, expected one for each of the pool's: pos, key"
    ):
        paged_append(pool, table, lengths, k, v)
    with pytest.raises(ValueError, match="k of float32, v of int8 for pages of int8: encode or cast them"):
        paged_append(pool, table, lengths, k.astype(jnp.float32), v, numbers=side)
    small = make_pool(*[jnp.zeros((LAYERS, PAGES, 16, 128), jnp.int8)] * 2)
    with pytest.raises(NotImplementedError, match="16 tokens of int8 take 4 rows, expected a multiple of 8"):
        paged_append(small, table, lengths, k, v, implementation="tpu interpret")
    long = jnp.zeros((B, K, 2**15), jnp.int32)
    with pytest.raises(NotImplementedError, match="a table of 786432 bytes in whole rows of 128 numbers"):
        paged_append(pool, long, lengths, k, v, numbers=side, implementation="tpu interpret")
    one = (jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))
    for shape, why in [
        ((1, 1, 12, 128), "blocks of 12 slots of float32"),
        ((1, 1, 8, 64), "rows are 64 wide"),
    ]:
        with pytest.raises(NotImplementedError, match=why):
            append([jnp.zeros(shape)], [jnp.zeros((1, 1, shape[3]))], *one, implementation="tpu")
    with pytest.raises(NotImplementedError, match="there is no such form"):
        append([jnp.zeros((1, 1, 8, 128))], [jnp.zeros((1, 1, 128))], *one, implementation="cuda")
