"""Pairs of float16 numbers in words, as a kernel takes them apart."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.base.bit_packing import pair
from kvjax.pallas_kernels.halves import halves


@pytest.mark.rotating
def test_every_finite_float16_comes_back():
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    scales = np.abs(every[::-1])
    for got, want in zip(halves(pair(jnp.asarray(scales), jnp.asarray(every))), (scales, every), strict=True):
        finite = np.isfinite(want)
        np.testing.assert_array_equal(np.asarray(got)[finite], want.astype(np.float32)[finite])
        # What is no number must not spoil the sums that give it no weight.
        assert np.isfinite(got).all()
