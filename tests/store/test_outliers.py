"""Outliers beside codes, against the largest numbers that numpy sorts out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.state import codes
from kvjax.state.cache import nbytes
from kvjax.state.codes import Codes
from kvjax.store.affine import Affine
from kvjax.store.outliers import Outliers
from kvjax.store.residual import Residual
from kvjax.store.rotate import Rotate
from kvjax.store.sphere import LloydMax

encode = jax.jit(codes.encode, static_argnames="codec")
decode = jax.jit(Codes.decode)
TOKENS, GROUPS = Affine(4, group=16), Affine(2, axis="channel", group=8)


def draw(rng, shape=(2, 3, 16, 32)):
    x = rng.normal(size=shape)
    return np.where(rng.random(shape) < 0.03, 15 * x, x).astype(np.float32)


@pytest.mark.parametrize("codec", [TOKENS, GROUPS], ids=str)
@pytest.mark.parametrize("share, kept", [(0.01, 1), (0.125, 4), (0.13, 5), (1, 32)])
def test_the_largest_of_a_token_come_back_exactly_and_others_from_the_codec(rng, codec, share, kept):
    x = draw(rng)
    back = decode(encode(jnp.asarray(x), Outliers(share) >> codec))
    largest = np.zeros(x.shape, bool)
    np.put_along_axis(largest, np.argsort(-np.abs(x), -1)[..., :kept], True, -1)
    rest = decode(encode(jnp.asarray(np.where(largest, 0, x)), codec))
    np.testing.assert_array_equal(back, np.where(largest, x, rest))


@pytest.mark.parametrize(
    "dtype, width, index", [(jnp.bfloat16, 64, 1), (jnp.float32, 64, 1), (jnp.bfloat16, 320, 2)]
)
def test_an_outlier_costs_a_number_and_an_index(rng, dtype, width, index):
    x = jnp.asarray(draw(rng, (1, 2, 16, width)), dtype)
    alone, both = (encode(x, c) for c in (TOKENS, Outliers(0.02) >> TOKENS))
    count = {64: 2, 320: 7}[width]
    assert nbytes(both) - nbytes(alone) == 2 * 16 * count * (x.dtype.itemsize + index)
    at = np.abs(np.asarray(x, np.float32)).argmax(-1)[..., None]
    back = decode(both)
    assert back.dtype == dtype
    found, want = (np.take_along_axis(np.asarray(y), at, -1) for y in (back, x))
    np.testing.assert_array_equal(found, want)


def test_outliers_no_longer_set_the_step_of_all_others(rng):
    x = draw(rng)
    plain, beside = (
        np.square(decode(encode(jnp.asarray(x), c)) - x).mean() for c in (TOKENS, Outliers(0.1) >> TOKENS)
    )
    assert beside < plain / 8


@pytest.mark.rotating
def test_wrappers_and_residuals_nest_in_any_order(rng):
    x = jnp.asarray(draw(rng))
    near, far = Outliers(0.05) >> Affine(8), Rotate() >> LloydMax(3)
    codecs = [
        Outliers(0.1) >> Rotate() >> Affine(8),
        Rotate() >> Outliers(0.1) >> Affine(8),
        Outliers(0.05) >> Outliers(0.05) >> Affine(8),
        Residual(near, near),
        Residual(far, Residual(far, near)),
        Residual(Rotate() >> GROUPS, near),
    ]
    for codec in codecs:
        assert np.square(decode(encode(x, codec)) - x).mean() < 1e-3
        # Every array has its slots, or granules of them, on the axis of the tokens.
        one = encode(x[:, :, 8:], codec)
        for name, whole in encode(x, codec).data.items():
            part = one.data[name]
            assert (*part.shape[:2], 2 * part.shape[2], *part.shape[3:]) == whole.shape


@pytest.mark.parametrize("share", [0, -0.1, 1.5])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match=r"a share of the channels in \(0, 1\], got"):
        Outliers(share)
