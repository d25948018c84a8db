"""Factors of keys and values against numpy's singular values, ranks that are not full, and outliers."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.store.affine import Affine
from kvjax.store.factors import Factors
from tests.float64.codes import affine, factored
from tests.sweep import sweep


def back(codec, x):
    return np.asarray(codec.decode(codec.encode(jnp.asarray(x, jnp.float32)), x.shape[-1], jnp.float32))


@pytest.mark.rotating
def test_granules_are_factored_apart_and_only_the_tall_factor_is_in_codes(rng):
    x = rng.normal(size=(2, 3, 40, 8)) * np.geomspace(0.1, 5, 8)
    got = back(Factors(20) >> Affine(4), x)
    want = np.zeros_like(x)
    for i, k, start in np.ndindex(2, 3, 2):
        part = np.s_[i, k, 20 * start : 20 * start + 20]
        want[part] = factored(affine(4, 8))(x[part])
    assert np.square(got - want).sum() < 1e-4 * np.square(want).sum()
    data = (Factors(20) >> Affine(4)).encode(jnp.asarray(x, jnp.float32))
    assert data["small"].shape == (2, 3, 2 * 8, 8) and data["small"].dtype == jnp.float16


@pytest.mark.parametrize("rank", sweep([0, 1, 3], 1))
def test_rows_of_a_lower_rank_come_back(rng, rank):
    """More channels than tokens, and none that are not 0."""
    x = rng.normal(size=(1, 1, 4, rank)) @ rng.normal(size=(1, 1, rank, 16))
    np.testing.assert_allclose(back(Factors(4) >> Affine(8), x), x, atol=0.05)


def test_channels_of_outliers_leave_a_smaller_error_than_in_codes_of_tokens(rng):
    x = rng.normal(size=(1, 1, 256, 16)) * np.where(np.arange(16) == 5, 40.0, 1.0)
    error = lambda codec: np.square(back(codec, x) - x).sum()  # noqa: E731
    assert error(Factors(256) >> Affine(4)) < 0.2 * error(Affine(4))


def test_tokens_that_no_granule_holds_and_sizes_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="30 tokens cannot be encoded 20 at a time"):
        (Factors(20) >> Affine(4)).encode(jnp.zeros((1, 1, 30, 8)))
    for wrong in (0, 2.5, True):
        with pytest.raises(ValueError, match="tokens are factored together, at least 1, got"):
            Factors(wrong)
