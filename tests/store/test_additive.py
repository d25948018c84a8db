"""Sums of vectors that commute with RoPE, against brute force in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.fitting.loops.keys_values import read_keys_values
from kvjax.fitting.statistics import additive
from kvjax.grammar.fitted import Fitted, with_fitted
from kvjax.state.cache import nbytes
from kvjax.state.codes import bind
from kvjax.store.additive import CommutingSums, NearestSums
from tests.float64.codes import commuting_sums
from tests.float64.reference import rope
from tests.methods.battery import MAIN, model

TEXTS = [list(range(1, 40)), list(range(40, 10, -1))]


def made(rng, bits, stages=3, width=8, layers=2):
    books = rng.normal(size=(layers, 3, stages, 2**bits, width)) / np.arange(1, stages + 1)[:, None, None]
    fitted = Fitted({"key codebooks": books.astype(np.float32)}, "CommutingSums", "")
    arrays = {fitted.digest: {n: jnp.asarray(x) for n, x in fitted.arrays.items()}}
    return fitted.arrays["key codebooks"].astype(float), bind(CommutingSums(2, bits, "key", fitted), arrays)


@pytest.mark.parametrize(("bits", "words"), [(1, 1), (3, 2), pytest.param(6, 3, marks=pytest.mark.rotating)])
def test_rows_become_the_nearest_sums_of_their_layer_and_head(rng, bits, words):
    books, codec = made(rng, bits)
    x = rng.normal(size=(2, 2, 3, 5, 8))
    data = jax.jit(codec.encode)(x.astype(np.float32))
    want = np.zeros_like(x)
    for i, b, k in np.ndindex(2, 2, 3):
        want[i, b, k] = commuting_sums(books[i, k])(x[i, b, k])
    back = jax.jit(lambda data: codec.decode(data, 8, jnp.float32))(data)
    np.testing.assert_allclose(back, want, atol=1e-5)
    assert data["words"].shape == (2, 2, 3, 5, words)


def test_the_sum_of_rotated_vectors_is_the_rotated_sum(rng):
    """The same codes, with every codebook rotated by a position, are the rotated key."""
    books, codec = made(rng, 4, layers=1)
    data = codec.encode(jnp.asarray(rng.normal(size=(1, 1, 3, 7, 8)), jnp.float32))
    key = np.asarray(codec.decode(data, 8, jnp.float32), float)
    for at in (1, 50):
        turned = rope(books, np.full(books.shape[-2], at), 100.0)
        back = NearestSums(4, jnp.asarray(turned, jnp.float32)).decode(data, 8, jnp.float32)
        np.testing.assert_allclose(back, rope(key, np.full(7, at), 100.0), atol=1e-5)


def real(z):
    return np.concatenate([z.real, z.imag], -1)


def test_a_stage_ends_at_the_least_squares_codebook_of_the_pairs_that_it_chooses(rng):
    """Numbers that are such sums are found; of others, no codebook is nearer with the same pairs."""
    truth = rng.normal(size=(4, 3)) + 1j * rng.normal(size=(4, 3))
    a, b = rng.integers(0, 4, (2, 400))
    rows = truth[a] + 1j * truth[b]
    error = min(
        np.square(real(rows) - commuting_sums(real(additive.stage(rows, 4, np.random.RandomState(i)))[None])(
            real(rows)
        )).sum() for i in range(6)
    )  # fmt: skip
    assert error < 0.02 * np.square(real(rows)).sum()
    noisy = rows + 0.3 * (rng.normal(size=rows.shape) + 1j * rng.normal(size=rows.shape))
    book = additive.stage(noisy, 4, np.random.RandomState(0))
    pairs = additive.nearest(noisy, book)
    pick = np.eye(4)[pairs[:, 0]] + 1j * np.eye(4)[pairs[:, 1]]
    best = np.linalg.lstsq(pick, noisy, rcond=None)[0]
    far = lambda c: np.square(np.abs(noisy - pick @ c)).sum()  # noqa: E731
    assert far(best) <= far(book) < 1.02 * far(best)


def test_distances_and_chances_are_those_of_all_pairs(rng):
    """Of chances, sums over a pair's second, its first and the rows; those of cold rows underflow."""
    rows, book = (rng.normal(size=(n, 3)) + 1j * rng.normal(size=(n, 3)) for n in (90, 4))
    rows[:70] *= 40
    pairs = book[:, None] + 1j * book[None]
    far = np.square(np.abs(rows[:, None, None] - pairs)).sum(-1)
    one, two, both = additive.distances(rows, book)
    want = far - np.square(np.abs(rows)).sum(-1)[:, None, None]
    np.testing.assert_allclose(one[:, :, None] + two[:, None] + both, want, atol=1e-9)
    for heat in (0.7, 0.05, 0.0):
        near = (far.min((1, 2), keepdims=True) - far) / (heat or 1e-12)
        chance = np.exp(near) / np.exp(near).sum((1, 2), keepdims=True)
        got = additive.chances(rows, book, heat)
        for x, over in zip(got, (2, 1, 0), strict=True):
            np.testing.assert_allclose(x, chance.sum(over), atol=1e-9)


@pytest.fixture(scope="module")
def fitted():
    return kvjax.fit(model("4/2"), "commvq:channels=4,bits=3", TEXTS)


def test_a_fit_finds_sums_near_which_the_texts_numbers_lie(fitted):
    m = model("4/2")
    read = read_keys_values(m, [TEXTS], raw=True)
    for of, x in (("key", read.k), ("value", read.v)):
        books = fitted.arrays[f"{of} codebooks"].astype(float)
        back = np.stack([
            [commuting_sums(book)(y) for book, y in zip(*each, strict=True)]
            for each in zip(books, x.astype(float), strict=True)
        ])  # fmt: skip
        assert books.shape == (2, 2, 4, 8, 16)
        assert np.square(back - x).sum() < 0.15 * np.square(x).sum()


@pytest.mark.rotating
def test_codebooks_are_arguments_of_programs_and_count_among_their_bytes(fitted):
    m, method = model("4/2"), kvjax.method("commvq", channels=4, bits=3, fitted=fitted)
    assert nbytes(with_fitted(m.params, method)) - nbytes(m.params) == 2 * (2 * 2 * 4 * 8 * 16) * 4
    _, cache = kvjax.prefill(m, MAIN.first, method=method)
    assert cache.groups[0].tail.k.data["words"].shape[-1] == 2


def test_codebooks_of_another_shape_are_refused(fitted):
    m = model("4/2")
    with pytest.raises(InputError, match="4 stages of 8 vectors, and channels=4, bits=2 ask for 4 of 4: run"):
        kvjax.prefill(m, MAIN.first, method=kvjax.method("commvq", channels=4, bits=2, fitted=fitted))
    with pytest.raises(InputError, match="it was fitted to another model"):
        kvjax.prefill(
            model("6/3"), MAIN.first, method=kvjax.method("commvq", channels=4, bits=3, fitted=fitted)
        )
    with pytest.raises(InputError, match="the texts have 69 tokens, expected at least one for each of 256"):
        kvjax.fit(m, "commvq:bits=8", TEXTS)
    for wrong, why in (((4, 9, "key"), "1 to 8 bits, got 9"), ((0, 2, "key"), "at least 1, got 0")):
        with pytest.raises(ValueError, match=why):
            CommutingSums(*wrong)
    with pytest.raises(ValueError, match="codebooks are of a 'key' or a 'value'"):
        CommutingSums(4, 2, "keys")
