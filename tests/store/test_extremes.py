"""Extremes beside codes, against numbers that numpy sorts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.state import codes
from kvjax.state.cache import nbytes
from kvjax.state.codes import Codes
from kvjax.store.affine import Affine
from kvjax.store.extremes import Extremes
from kvjax.store.residual import Residual

encode = jax.jit(codes.encode, static_argnames="codec")
decode = jax.jit(Codes.decode)
TOKENS, CHANNELS = Affine(4, group=16), Affine(2, axis="channel", group=8)


def filtered(x, axis, kept, group):
    """(where the extremes are, x with the mean of the others in their place), in float64."""
    lines = np.asarray(x, np.float64)
    if axis == "channel":
        *batch, s, h = x.shape
        lines = lines.reshape(*batch, s // group, group, h).swapaxes(-1, -2)
    rank = lines.argsort(-1, kind="stable").argsort(-1)
    found = (rank < kept) | (rank >= lines.shape[-1] - kept)
    rest = np.where(found, lines.mean(-1, where=~found, keepdims=True), lines)
    if axis == "channel":
        return (y.swapaxes(-1, -2).reshape(x.shape) for y in (found, rest))
    return found, rest


def draw(rng, shape=(2, 3, 32, 32)):
    # Channels with a mean far from 0, as keys have them.
    x = rng.normal(size=shape) + np.linspace(-20, 20, shape[-1])
    return np.where(rng.random(shape) < 0.03, 15 * x, x).astype(np.float32)


@pytest.mark.parametrize("codec", [TOKENS, CHANNELS], ids=str)
@pytest.mark.parametrize(
    "axis, share, kept", [("token", 0.02, 1), ("token", 0.25, 4), ("channel", 0.02, 1), ("channel", 0.3, 3)]
)
def test_both_ends_come_back_exactly_and_the_others_from_the_codec(rng, codec, axis, share, kept):
    x, group = draw(rng), 16 if axis == "channel" else None
    found, rest = filtered(x, axis, kept, group)
    assert found.mean() == 2 * kept / (group or x.shape[-1])
    back = decode(encode(jnp.asarray(x), Extremes(share, axis, group) >> codec))
    others = decode(encode(jnp.asarray(rest, jnp.float32), codec))
    np.testing.assert_array_equal(np.asarray(back)[found], x[found])
    # The mean in float32 may round to another code; it is the code of nothing that comes back.
    np.testing.assert_allclose(np.asarray(back)[~found], np.asarray(others)[~found], atol=1e-5)


@pytest.mark.parametrize("axis, codec", [("token", TOKENS), ("channel", CHANNELS)])
def test_extremes_set_no_step_for_the_others(rng, axis, codec):
    x = jnp.asarray(draw(rng))
    beside = Extremes(0.2, axis, 16 if axis == "channel" else None) >> codec
    plain, better = (float(np.square(decode(encode(x, c)) - x).mean()) for c in (codec, beside))
    assert better < plain / 4


@pytest.mark.parametrize(
    "dtype, group, index", [(jnp.bfloat16, 64, 1), (jnp.float32, 64, 1), (jnp.bfloat16, 320, 2)]
)
def test_an_extreme_costs_a_number_and_an_index(rng, dtype, group, index):
    x = jnp.asarray(draw(rng, (1, 2, 640, 16)), dtype)
    alone, token, channel = (
        encode(x, c) for c in (TOKENS, Extremes(0.2) >> TOKENS, Extremes(0.02, "channel", group) >> TOKENS)
    )
    each = jnp.dtype(dtype).itemsize + index
    count = {64: 1, 320: 4}[group]
    assert nbytes(channel) - nbytes(alone) == 2 * 16 * (640 // group) * 2 * count * each
    assert nbytes(token) - nbytes(alone) == 2 * 640 * 2 * 2 * (jnp.dtype(dtype).itemsize + 1)
    assert decode(channel).dtype == dtype
    # A codec that another one follows keeps the numbers in the dtype of the rows, too.
    first = Extremes(0.02, "channel", group) >> TOKENS
    assert nbytes(encode(x, Residual(first, TOKENS))) == nbytes(channel) + nbytes(alone)


@pytest.mark.rotating
def test_equal_numbers_and_single_ones_come_back():
    for shape in ((1, 1, 8, 16), (1, 1, 8, 1)):
        x = jnp.full(shape, 3.0)
        for wrapper in (Extremes(1.0), Extremes(1.0, "channel", 4), Extremes(0.1, "channel", 1)):
            np.testing.assert_array_equal(decode(encode(x, wrapper >> Affine(8))), x)


def test_granules_are_those_of_both_and_lie_on_the_axis_of_the_tokens(rng):
    codec = Extremes(0.1, "channel", 16) >> CHANNELS
    assert codec.granule == 16 and (Extremes(0.1) >> CHANNELS).granule == 8
    x = jnp.asarray(draw(rng))
    part = encode(x[:, :, 16:], codec)
    for name, whole in encode(x, codec).data.items():
        np.testing.assert_array_equal(part.data[name], whole[:, :, whole.shape[2] // 2 :])


@pytest.mark.parametrize(
    "given, message",
    [
        ((0,), r"extremes are a share of the numbers in \(0, 1\], got 0"),
        ((1.5,), r"a share of the numbers in \(0, 1\], got 1.5"),
        ((0.1, "head"), "axis must be 'token' or 'channel', got 'head'"),
        ((0.1, "channel"), "give it for axis 'channel', such as 64, .* got None"),
        ((0.1, "token", 8), "leave it out for axis 'token', got 8"),
    ],
)
def test_what_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Extremes(*given)
    with pytest.raises(ValueError, match="12 tokens cannot be encoded 8 at a time"):
        (Extremes(0.1, "channel", 8) >> TOKENS).encode(jnp.zeros((1, 12, 16)))
