"""Blocks that share a scale, against the specifications' equations in numpy with ml_dtypes' casts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.state.cache import nbytes
from kvjax.state.codes import dense, encode
from kvjax.store.blocks import Microscaled, NearestPower, SharedExponents
from kvjax.store.minifloats import FORMATS, of_codes, to_codes
from kvjax.store.nvfloat4 import NvFloat4
from kvjax.store.symmetric import Symmetric
from tests.float64.blocks import TYPES, cast, microscaled, most_of, nvfp4, shared, symmetric
from tests.sweep import sweep

SHAPE = (2, 3, 5, 64)


@jax.jit(static_argnames="codec")
def back(x, codec):
    return dense(encode(x, codec))


def rows_of(rng, scale=1.0):
    """Rows with outliers, a block of zeros, and a channel that is always small."""
    x = rng.standard_t(3, size=SHAPE).astype(np.float32) * scale
    x[0, 0, 0, :32], x[..., 40] = 0, x[..., 40] * 1e-3
    return x


@pytest.mark.rotating
@pytest.mark.parametrize("kind", sweep(TYPES, "e2m1", "e2m3"))
def test_every_code_is_the_number_of_the_format(kind):
    """Subnormal ones, too; what lies halfway between two, and next to that, is rounded as by a cast."""
    count = 2 ** FORMATS[kind].bits
    with np.errstate(invalid="ignore"):
        numbers = np.arange(count, dtype=np.uint8).view(TYPES[kind]).astype(np.float64)
    sound = np.isfinite(numbers)
    found = np.asarray(of_codes(jnp.arange(count, dtype=jnp.uint32), FORMATS[kind]), np.float64)
    np.testing.assert_array_equal(found[sound], numbers[sound])
    known = np.unique(numbers[sound])
    assert FORMATS[kind].largest == known[-1] == most_of(kind)
    halves = ((known[1:] + known[:-1]) / 2).astype(np.float32)
    near = np.concatenate([np.nextafter(halves, np.float32(s)) for s in (-np.inf, np.inf)])
    x = np.concatenate([known, halves, near, [3e38, -3e38]]).astype(np.float32)
    got = np.asarray(of_codes(to_codes(jnp.asarray(x), FORMATS[kind]), FORMATS[kind]), np.float64)
    np.testing.assert_array_equal(got, cast(x, kind))


@pytest.mark.parametrize("scale", [1.0, 1e-6, 3e8])
@pytest.mark.parametrize("kind", [*TYPES, "int8"])
def test_microscaled_numbers_are_those_of_the_specification(rng, kind, scale):
    x = rows_of(rng, scale)
    got = back(jnp.asarray(x), Microscaled(kind))
    np.testing.assert_array_equal(np.asarray(got, np.float64), microscaled(kind)(x))


@pytest.mark.parametrize("fraction", [2, 4, 7])
def test_shared_microexponents_are_those_of_the_paper(rng, fraction):
    x = rows_of(rng)
    got = back(jnp.asarray(x), SharedExponents(fraction))
    np.testing.assert_array_equal(np.asarray(got, np.float64), shared(fraction)(x))


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("scale", [None, 1.0, 1e-3])
def test_nvfp4_has_a_float8_scale_for_every_block(rng, scale, two):
    x = rows_of(rng)
    got = np.asarray(back(jnp.asarray(x), NvFloat4(scale=scale, two=two)))
    np.testing.assert_allclose(got, nvfp4(scale=scale, two=two)(x), rtol=1e-6)


def test_four_over_six_has_less_error_and_takes_both(rng):
    """The example of the paper's figure: between 4 and 6 lies nothing, so a block that needs 5 takes 4."""
    x = np.array([10, 20, 30, 40] * 4, np.float32)
    tensor = 40 / (6 * 256)
    got = np.asarray(back(jnp.asarray(x[None]), NvFloat4(two=True)))[0]
    np.testing.assert_allclose(got, np.array([1, 2, 3, 4] * 4) * 384 * tensor, rtol=1e-6)
    plain = np.asarray(back(jnp.asarray(x[None]), NvFloat4()))[0]
    assert np.abs(plain - x).max() > 3
    rows = jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)
    errors = [float(jnp.square(back(rows, NvFloat4(two=two)) - rows).mean()) for two in (False, True)]
    assert errors[1] < 0.95 * errors[0]


@pytest.mark.parametrize("bits, group", [(8, None), (4, 16), (3, None), (2, 8)])
def test_symmetric_codes_are_those_of_the_largest_number(rng, bits, group):
    x = rows_of(rng)
    got = np.asarray(back(jnp.asarray(x), Symmetric(bits, group)))
    np.testing.assert_allclose(got, symmetric(bits, group)(x), rtol=1e-6)


# Bits of a number of 64, with everything counted.
BITS = {
    Microscaled("e4m3"): 8 + 8 / 32,
    Microscaled("e2m3"): 6 + 8 / 32,
    Microscaled("e2m1"): 4 + 8 / 32,
    Microscaled("int8"): 8 + 8 / 32,
    SharedExponents(7): 9,
    SharedExponents(4): 6,
    SharedExponents(2): 4,
    NvFloat4(): 4 + 8 / 16 + 32 / 64,
    NvFloat4(scale=1.0): 4 + 8 / 16,
    Symmetric(8): 8 + 32 / 64,
    Symmetric(4, 16): 4 + 32 / 16,
}


@pytest.mark.parametrize(
    "codec", sweep(BITS, Microscaled("e2m1"), SharedExponents(2), Symmetric(4, 16)), ids=str
)
def test_bytes_are_the_codes_and_the_scales(rng, codec):
    assert nbytes(encode(jnp.asarray(rows_of(rng)), codec)) * 8 / np.prod(SHAPE) == BITS[codec]


@pytest.mark.parametrize("codec", [*BITS, NvFloat4(two=True)], ids=str)
def test_what_was_decoded_may_be_encoded_again(rng, codec):
    once = back(jnp.asarray(rows_of(rng)), codec)
    again = once
    for _ in range(4):
        again = back(again, codec)
    np.testing.assert_allclose(again, once, rtol=1e-5, atol=1e-12)


def test_bits_that_do_not_exist_and_blocks_that_do_not_divide_rows_are_refused(rng):
    for made, message in (
        (lambda: Microscaled("e3m4"), "kind must be one of e4m3, e5m2, e2m3, e3m2, e2m1, int8, got 'e3m4'"),
        (lambda: Microscaled("e2m1", 0), "a block is a whole number of channels, at least 1, got 0"),
        (lambda: SharedExponents(8), "a fraction has 1 to 7 bits, got 8"),
        (lambda: SharedExponents(4, 5), "an even number of channels, got 5"),
        (lambda: NvFloat4(scale=0.0), "the scale of a tensor is a positive number, or None, got 0.0"),
        (lambda: Symmetric(1), "codes around 0 have 2 to 8 bits, got 1"),
        (lambda: kvjax.method("mxfp8", kind="e2m1"), "kind must be"),
        (lambda: kvjax.method("mx", bits=5), "bits must be"),
    ):
        with pytest.raises(ValueError, match=message):
            made()
    for codec, name in ((Microscaled("int8", 24), "block=24"), (Symmetric(4, 24), "group=24")):
        with pytest.raises(ValueError, match=f"{name} must divide the 64 channels of a head"):
            encode(jnp.asarray(rows_of(rng)), codec)
    with pytest.raises(kvjax.InputError, match="block=24 must divide the 32 channels of a head"):
        kvjax.prefill(kvjax.load("recall-tiny"), [[1, 2, 3]], method="mxfp4:block=24")


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_the_nearest_power_of_two_is_that_of_the_authors_equation(rng, scale):
    x = rows_of(rng, scale)
    got = np.asarray(back(jnp.asarray(x), NearestPower("e2m1", 32, part=0.156)), np.float64)
    want = microscaled("e2m1", 32, 0.156)(x.astype(np.float64))
    # Numbers between two codes may become the other one in float32.
    assert (np.abs(got - want) <= 1e-6 * np.abs(x).max()).mean() > 0.999
    assert not got[0, 0, 0, :32].any()
    with pytest.raises(ValueError, match="part is a positive share"):
        NearestPower("e2m1", part=0.0)
