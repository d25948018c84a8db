"""Codes of several channels together, by codebooks of vectors, against brute force in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.cluster.vq import kmeans2

import kvjax
from kvjax.base.errors import InputError
from kvjax.fitting.statistics.levels import felt, padded_rows
from kvjax.grammar.fitted import Fitted
from kvjax.state.codes import bind
from kvjax.store import coupled, kmeans
from kvjax.store.coupled import CoupledCodes
from kvjax.store.kmeans import weighted_centroids
from tests.float64.codes import vectors
from tests.methods.battery import MAIN, model

TEXTS = [list(range(1, 40)), list(range(40, 10, -1))]


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_rows_become_the_nearest_vectors_of_their_layer_and_head(rng, bits):
    books = rng.normal(size=(2, 3, 4, 2**bits, 2))
    fitted = Fitted({"key centroids": books.astype(np.float32)}, "CoupledCodes", "")
    arrays = {fitted.digest: {n: jnp.asarray(x) for n, x in fitted.arrays.items()}}
    codec = bind(CoupledCodes(2, bits, "key", fitted), arrays)
    x = rng.normal(size=(2, 2, 3, 5, 8))
    data = jax.jit(codec.encode)(x.astype(np.float32))
    want = np.zeros_like(x)
    for i, b, k in np.ndindex(2, 2, 3):
        want[i, b, k] = vectors(books[i, k])(x[i, b, k])
    back = jax.jit(lambda data: codec.decode(data, 8, jnp.float32))(data)
    np.testing.assert_allclose(back, want, atol=1e-6)
    assert data["words"].shape == (2, 2, 3, 5, {1: 1, 3: 2, 8: 1}[bits])


def test_many_tokens_are_encoded_in_pieces_as_they_are_at_once(rng, monkeypatch):
    fitted = Fitted(
        {"key centroids": rng.normal(size=(1, 2, 4, 16, 2)).astype(np.float32)}, "CoupledCodes", ""
    )
    arrays = {fitted.digest: {n: jnp.asarray(x[0]) for n, x in fitted.arrays.items()}}
    codec = bind(CoupledCodes(2, 4, "key", fitted), arrays)
    x = jnp.asarray(rng.normal(size=(3, 2, 21, 8)), jnp.float32)
    whole = jax.jit(lambda x: codec.encode(x)["words"])(x)
    monkeypatch.setattr(coupled, "PIECE", 8)
    np.testing.assert_array_equal(jax.jit(lambda x: codec.encode(x)["words"])(x), whole)


def test_centroids_are_means_of_what_is_nearest_to_them_by_weight(rng):
    x, w = rng.normal(size=(200, 2)), rng.exponential(size=200)
    got = weighted_centroids(x, w, 8, turns=100)
    near = ((x[:, None] - got) ** 2).sum(-1).argmin(-1)
    for i in set(near):
        np.testing.assert_allclose(got[i], np.average(x[near == i], axis=0, weights=w[near == i]), atol=1e-9)
    error = lambda c: ((x[:, None] - c) ** 2).sum(-1).min(-1).sum()  # noqa: E731
    mine = error(weighted_centroids(x, np.ones(200), 8))
    assert mine < 1.1 * error(kmeans2(x, 8, 25, seed=0, minit="++")[0])


def test_centroids_far_from_zero_are_those_of_the_same_numbers_around_it(rng, monkeypatch):
    x, w = rng.normal(size=(300, 2)), rng.exponential(size=300)
    want = weighted_centroids(x, w, 8)
    monkeypatch.setattr(kmeans, "PIECE", 70)
    np.testing.assert_allclose(weighted_centroids(x + 3000, w, 8) - 3000, want, atol=1e-9)


@pytest.mark.rotating
def test_a_fit_finds_vectors_near_which_the_texts_numbers_lie():
    m = model("4/2")
    fitted = kvjax.fit(m, "cq:channels=2,bits=4", TEXTS)
    numbers = felt(m.config, m.params, *padded_rows(m, TEXTS, 0)[0])[0]
    x = np.concatenate([np.asarray(numbers.k)[:, b, :, : len(row)] for b, row in enumerate(TEXTS)], 2)
    back = np.stack([[vectors(book)(y) for book, y in zip(books, z, strict=True)] for books, z in zip(
        fitted.arrays["key centroids"], x, strict=True
    )])  # fmt: skip
    assert np.square(back - x).sum() < 0.15 * np.square(x).sum()
    _, cache = kvjax.prefill(m, MAIN.first, method=kvjax.method("cq", channels=2, bits=4, fitted=fitted))
    assert cache.groups[0].tail.k.data["words"].shape[-1] == 1


def test_codebooks_of_another_shape_are_refused():
    m = model("4/2")
    with pytest.raises(InputError, match="16 vectors of 2 channels, and bits=2, channels=2 ask for 4 of 2"):
        fitted = kvjax.fit(m, "cq:channels=2,bits=4", TEXTS)
        kvjax.prefill(m, MAIN.first, method=kvjax.method("cq", channels=2, bits=2, fitted=fitted))
    with pytest.raises(InputError, match="channels is 3, expected a divisor of 16"):
        kvjax.fit(m, "cq:channels=3", TEXTS)
    with pytest.raises(InputError, match="the texts have 69 tokens, expected at least one for each of 256"):
        kvjax.fit(m, "cq", TEXTS)
    with pytest.raises(ValueError, match="a vector's code has 1 to 8 bits, got 9"):
        CoupledCodes(2, 9, "key")
