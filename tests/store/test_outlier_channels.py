"""Outlier channels: which they are, that each codec sees its own, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.words import Affine, OutlierChannels


def back(data, codec, width):
    return codec.decode(data, width, jnp.float32)


def test_channels_of_the_largest_norm_are_encoded_apart(rng):
    x = rng.normal(size=(2, 3, 24, 16)).astype(np.float32)
    x[..., 5] *= 40
    x[:, :, 8:16, 11] *= 300
    codec = OutlierChannels(2, 8, Affine(8), Affine(2))
    coded = codec.encode(jnp.asarray(x))
    norms = np.linalg.norm(x.reshape(2, 3, 3, 8, 16), axis=-2)
    largest = np.sort(np.argsort(-norms, -1)[..., :2], -1)
    np.testing.assert_array_equal(np.sort(coded["channels"], -1), largest)
    # The other channels' ranges are not those of the large ones: a step of 2 bits is below 3.
    off = np.abs(np.asarray(back(coded, codec, 16)) - x)
    large = np.repeat((largest[..., None] == np.arange(16)).any(-2), 8, -2)
    assert off[~large].max() < 3
    assert off[large].max() < 300 * 8 / 255


def test_at_most_half_of_the_channels_are_outliers(rng):
    x = jnp.asarray(rng.normal(size=(1, 1, 4, 6)), jnp.float32)
    coded = OutlierChannels(5, 4, Affine(8), Affine(8)).encode(x)
    assert coded["channels"].shape == (1, 1, 1, 3)


def test_gradients_reach_both_parts(rng):
    x = jnp.asarray(rng.normal(size=(1, 1, 4, 8)), jnp.float32)
    codec = OutlierChannels(2, 4, Affine(8), Affine(8))
    gradient = jax.grad(lambda x: back(codec.encode(x), codec, 8).sum())(x)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize(("count", "group"), [(0, 8), (True, 8), (2, 0), (2, 1.5)])
def test_numbers_that_are_no_counts_are_refused(count, group):
    with pytest.raises(ValueError, match="is a whole number of at least 1, got"):
        OutlierChannels(count, group, Affine(8), Affine(8))


def test_tokens_that_are_no_multiple_are_refused():
    with pytest.raises(ValueError, match="6 tokens cannot be encoded 4 at a time"):
        OutlierChannels(1, 4, Affine(8), Affine(8)).encode(jnp.zeros((6, 8)))
