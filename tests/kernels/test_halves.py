"""Short numbers, alone and in words as a kernel takes them apart."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.base.bit_packing import of_short, pair, short
from kvjax.pallas_kernels.halves import halves


@pytest.mark.rotating
def test_every_short_number_comes_back():
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    bits = np.arange(2**16, dtype=np.uint32)
    want = every.astype(np.float64)
    # Of the largest exponent four bits are a power of two and six a fraction.
    steps = bits & 0x3FF
    far = (1 + (steps & 63) / 64) * 2.0 ** (16 + (steps >> 6)) * np.where(bits >> 15, -1, 1)
    want = np.where((bits & 0x7C00) == 0x7C00, far, want)
    scales = bits & 0x7FFF
    low, high = halves(pair(jnp.asarray(scales), jnp.asarray(bits)))
    np.testing.assert_array_equal(high, want.astype(np.float32))
    np.testing.assert_array_equal(low, np.abs(want).astype(np.float32))
    numbers = steps != 0x3FF
    np.testing.assert_array_equal(np.asarray(of_short(jnp.asarray(bits)))[numbers], want[numbers])
    # What is no number must not spoil the sums that give it no weight.
    assert np.isfinite(high).all() and np.isnan(of_short(jnp.asarray(bits[31 * 1024 + 1023])))


def test_numbers_are_rounded_to_float16_or_to_six_bits():
    x = np.array([0.1, -3e-6, 65504, -65519, 65520, 1e5, -123456, 3e6, -7e8, 4e9], np.float32)
    got = np.asarray(of_short(short(jnp.asarray(x))), np.float64)
    near = np.abs(x) < 65520
    np.testing.assert_array_equal(got[near], x[near].astype(np.float16))
    unit = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(x), 2.0**16))) - 6)
    assert (np.abs(got - x) <= unit / 2)[~near].all()
    out, back = (np.abs(np.asarray(of_short(short(jnp.asarray(x), outward=o)))) for o in (True, False))
    assert ((np.abs(x) <= out) & (out < np.abs(x) + unit))[~near].all()
    assert ((back <= np.maximum(np.abs(x), 65536)) & (back > np.abs(x) - unit))[~near].all()
    none = jnp.asarray([np.nan, np.inf, -np.inf, 5e9], jnp.float32)
    assert np.isnan(of_short(short(none))).all()
