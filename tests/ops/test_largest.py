"""The largest numbers of rows, against numpy's sorts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.base.largest import first_largest, largest


@pytest.mark.rotating
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_the_largest_of_a_row_are_those_in_front_of_a_stable_sort(dtype, count):
    # Few different numbers, so that many are equal, with zeros of both signs and infinities among them.
    x = np.random.default_rng(0).integers(-6, 7, (5, 3, 40)) / 3
    x[0, 0, :3] = (np.inf, -np.inf, -0.0)
    x[1] = 0
    given = jnp.asarray(x, dtype)
    order = np.argsort(-np.abs(np.asarray(given, np.float64)), axis=-1, kind="stable")
    wanted = np.zeros(x.shape, bool)
    np.put_along_axis(wanted, order[..., :count], True, -1)
    np.testing.assert_array_equal(jax.jit(largest, static_argnums=1)(given, count), wanted)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_first_largest_is_where_numpy_finds_it(axis):
    x = np.random.default_rng(1).integers(-4, 5, (6, 7, 8)).astype(np.float32)
    x[:, 2] = -np.inf
    at, most = first_largest(jnp.asarray(x), axis)
    np.testing.assert_array_equal(at, x.argmax(axis))
    np.testing.assert_array_equal(most, x.max(axis))
