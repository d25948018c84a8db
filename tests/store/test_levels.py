"""Codes by fitted levels, against brute force in float64 numpy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.grammar.fitted import Fitted
from kvjax.state.cache import nbytes
from kvjax.state.codes import bind
from kvjax.store.extremes import Extremes
from kvjax.store.kmeans import best_levels
from kvjax.store.levels import ByChannel, ByToken, Levels
from kvjax.store.outliers import Outliers

LAYERS, ROWS, HEADS, TOKENS, WIDTH, BITS = 2, 3, 2, 5, 16, 3


def nearest(y, levels):
    return levels[np.abs(y[..., None] - levels).argmin(-1)]


def error(x, w, levels):
    return (w * (x - nearest(x, levels)) ** 2).sum()


@pytest.mark.parametrize("count", [1, 3, 8])
def test_levels_are_the_best_of_all_partitions_and_no_worse_than_even_ones(rng, count):
    x, w = np.sort(rng.normal(size=9)), rng.exponential(size=9)
    got = best_levels(w, w * x, w * x * x, count)
    ends = (np.split(np.arange(9), at) for at in itertools.combinations(range(1, 9), count - 1))
    best = min(sum((w[i] * (x[i] - np.average(x[i], weights=w[i])) ** 2).sum() for i in e) for e in ends)
    assert (np.diff(got) > 0).all() and abs(error(x, w, got) - best) < 1e-12
    assert error(x, w, got) <= error(x, w, np.linspace(x[0], x[-1], count))


def test_bins_without_weight_have_no_level_and_too_few_numbers_repeat_one():
    x, w = np.array([0.0, 0.5, 1.0]), np.array([1.0, 0.0, 3.0])
    assert best_levels(w, w * x, w * x * x, 4).tolist() == [0, 1, 1, 1]
    assert best_levels(0 * w, w * 0, w * 0, 3).tolist() == [-1, 0, 1]
    # A weight that the sum of all does not show, before others and behind them.
    tiny, one, x = np.array([1e-20, 1, 1, 1e-20]), np.array([1.0, 1, 1, 1]), np.array([-9.0, 2, 3, 9])
    assert best_levels(tiny, tiny * x, tiny * x * x, 2).tolist() == [2, 3]
    assert best_levels(one, x, x * x, 4).tolist() == x.tolist()


@pytest.fixture
def fitted(rng):
    numbers = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    levels = {f"{of} levels": np.sort(numbers(LAYERS, 2**BITS), -1) for of in ("key", "value")}
    centre, size = numbers(LAYERS, HEADS, WIDTH), np.exp(numbers(LAYERS, HEADS, WIDTH))
    return Fitted(levels | {"key centre": centre, "key range": size}, "Levels", "")


def through(codec, fitted, x):
    """Encode and decode rows [L, B, K, S, H], all layers at once; return these, and the codes."""
    codec = bind(codec, {fitted.digest: {n: jnp.asarray(a) for n, a in fitted.arrays.items()}})
    data = jax.jit(lambda x: codec.encode(x))(x)
    return np.asarray(codec.decode(data, WIDTH, jnp.float32)), data


def test_keys_are_the_nearest_level_of_their_channels_range_but_for_the_outermost(rng, fitted):
    x = 2 * rng.normal(size=(LAYERS, ROWS, HEADS, TOKENS, WIDTH)).astype(np.float32)
    codec = ByChannel(0.01, fitted) >> Outliers(0.1) >> Levels(BITS, "key", fitted)
    got, data = through(codec, fitted, jnp.asarray(x))
    arrays = {n: a.astype(np.float64) for n, a in fitted.arrays.items()}
    centre, size = (arrays[f"key {n}"][:, None, :, None] for n in ("centre", "range"))
    y = (x - centre) / size
    back = np.stack([nearest(y[i], arrays["key levels"][i]) for i in range(LAYERS)])
    # Two of 16 channels, those farthest outside their ranges.
    outer = np.abs(y).argsort(-1).argsort(-1) >= WIDTH - 2
    np.testing.assert_allclose(got, np.where(outer, x, back * size + centre), atol=1e-5)
    # Per token two words of 2 and 1 bits; two float32 numbers and their uint8 channels.
    assert nbytes(data) == LAYERS * ROWS * HEADS * TOKENS * (2 * 4 + 2 * (4 + 1))


def test_values_are_the_nearest_level_of_their_tokens_range_without_its_ends(rng, fitted):
    x = rng.normal(size=(LAYERS, ROWS, HEADS, TOKENS, WIDTH)).astype(np.float32)
    codec = Extremes(0.01) >> ByToken() >> Levels(BITS, "value", fitted)
    got, data = through(codec, fitted, jnp.asarray(x))
    place = x.argsort(-1).argsort(-1)
    ends = (place == 0) | (place == WIDTH - 1)
    low, high = (f(x, -1, where=~ends, initial=i, keepdims=True) for f, i in ((np.min, 9), (np.max, -9)))
    size, centre = ((a / 2).astype(np.float16).astype(float) for a in (high - low, high + low))
    levels = fitted.arrays["value levels"].astype(np.float64)
    y = (x - centre) / size
    back = np.stack([nearest(y[i], levels[i]) for i in range(LAYERS)])
    np.testing.assert_allclose(got, np.where(ends, x, back * size + centre), atol=1e-5)
    assert nbytes(data) == LAYERS * ROWS * HEADS * TOKENS * (2 * 4 + 4 + 2 * (4 + 1))


def test_words_without_what_they_were_fitted_to_encode_nothing():
    with pytest.raises(ValueError, match=r"Levels\(bits=3, of='key', .* use it in a method"):
        Levels(BITS, "key").encode(jnp.ones((1, 1, 1, WIDTH)))
    with pytest.raises(ValueError, match="bits must be 1, 2, 3 or 4, got 5"):
        Levels(5, "key")
    with pytest.raises(ValueError, match=r"a share in \[0, 1\], got 2"):
        ByChannel(2)
