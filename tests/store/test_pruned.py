"""Rows that keep their largest numbers, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.state import codes
from kvjax.state.cache import nbytes
from kvjax.state.codes import Codes
from kvjax.store.pruned import Pruned

encode = jax.jit(codes.encode, static_argnames="codec")
decode = jax.jit(Codes.decode)


@pytest.mark.parametrize(
    ("share", "width", "kept"), [(0.5, 32, 16), (0.3, 80, 24), (0.29, 100, 29), (1.0, 24, 24), (0.01, 8, 1)]
)
def test_the_largest_numbers_of_a_token_stay_as_they_are_and_others_are_zero(rng, share, width, kept):
    x = rng.normal(size=(2, 3, 5, width)).astype(np.float32)
    codes = encode(jnp.asarray(x), Pruned(share))
    want = np.zeros_like(x)
    largest = np.argsort(-np.abs(x), -1)[..., :kept]
    np.put_along_axis(want, largest, np.take_along_axis(x, largest, -1), -1)
    np.testing.assert_array_equal(decode(codes), want)
    # Encoded once more, a row is what it was.
    np.testing.assert_array_equal(decode(encode(decode(codes), Pruned(share))), want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_row_costs_its_numbers_and_a_bit_per_channel(rng, dtype):
    x = jnp.asarray(rng.normal(size=(1, 2, 4, 128)), dtype)
    codes = encode(x, Pruned(0.3))
    assert nbytes(codes) == 2 * 4 * (38 * x.dtype.itemsize + 128 // 8)
    assert decode(codes).dtype == dtype


def test_of_equal_numbers_the_first_stay():
    x = jnp.asarray([[2.0, -2.0, 2.0, 0.0, 1.0, -2.0]])[None, None]
    np.testing.assert_array_equal(decode(encode(x, Pruned(0.5)))[0, 0], [[2, -2, 2, 0, 0, 0]])


@pytest.mark.parametrize("share", [0, -0.5, 1.5])
def test_a_share_that_means_nothing_is_refused(share):
    with pytest.raises(ValueError, match=r"what stays is a share of the channels in \(0, 1\]"):
        Pruned(share)
