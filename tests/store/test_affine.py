"""Codecs against quantisers written in numpy from their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache
from kvjax.cache import Codes, nbytes
from kvjax.store.affine import Affine, Float8

encode = jax.jit(cache.encode, static_argnames="codec")
decode = jax.jit(Codes.decode)
SHAPE = (2, 3, 16, 32)  # batch, heads, tokens, channels


def rows_of(x, axis, group):
    """Groups on the last axis: [.., S, H / group, group] by token, [.., S / group, H, group] by channel."""
    b, k, s, h = x.shape
    if axis == "token":
        return x.reshape(b, k, s, h // group, group)
    return x.reshape(b, k, s // group, group, h).swapaxes(-1, -2)


def tokens_of(rows, axis):
    """Back from `rows_of` to [.., S, H]."""
    if axis == "token":
        return rows.reshape(*rows.shape[:3], -1)
    return rows.swapaxes(-1, -2).reshape(*rows.shape[:2], -1, rows.shape[3])


def affine_by_hand(x, bits, axis, group):
    """(codes, scale, zero) of every group, with code = round((x - zero) / scale).

    zero = min and scale = (max - min) / (2^bits - 1) are stored as float16; the codes are those of the
    stored numbers.
    """
    rows = rows_of(np.asarray(x, np.float32), axis, group)
    low, high = rows.min(-1), rows.max(-1)
    zero, scale = low.astype(np.float16), ((high - low) / np.float32(2**bits - 1)).astype(np.float16)
    step = np.where(scale == 0, 1, scale).astype(np.float32)[..., None]
    codes = np.clip(np.rint((rows - zero.astype(np.float32)[..., None]) / step), 0, 2**bits - 1)
    return codes, scale, zero


CASES = [(8, "token", None), (4, "token", 16), (2, "token", 8), (2, "channel", 8), (4, "channel", 16)]


def make(rng, bits, axis, group, scale=1.0):
    x = jnp.asarray(rng.normal(size=SHAPE) * scale, jnp.float32)
    return x, Affine(bits, axis=axis, group=group), group or SHAPE[-1]


@pytest.mark.parametrize("bits, axis, group", CASES)
def test_affine_equals_a_quantiser_by_hand(rng, bits, axis, group):
    x, codec, size = make(rng, bits, axis, group)
    coded = encode(x, codec)
    codes, scale, zero = affine_by_hand(x, bits, axis, size)
    np.testing.assert_array_equal(coded.data["scale"], scale)
    np.testing.assert_array_equal(coded.data["zero"], zero)
    want = codes * scale.astype(np.float64)[..., None] + zero.astype(np.float64)[..., None]
    np.testing.assert_allclose(decode(coded), tokens_of(want, axis), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits, axis, group", CASES)
def test_the_error_is_at_most_half_a_step_and_the_rounding_of_the_ends(rng, bits, axis, group):
    x, codec, size = make(rng, bits, axis, group, scale=3.0)
    error = np.abs(np.asarray(decode(encode(x, codec)), np.float64) - np.asarray(x))
    rows = rows_of(np.asarray(x, np.float64), axis, size)
    span = rows.max(-1) - rows.min(-1)
    step = span / (2**bits - 1)
    # float16 keeps 11 bits: of the zero point, and of the step that is taken up to 2^bits - 1 times.
    ends = 2.0**-11 * (np.abs(rows).max(-1) + span)
    bound = np.broadcast_to((step * (0.5 + 2.0**-11) + ends)[..., None], rows.shape)
    assert (rows_of(error, axis, size) <= bound).all()


@pytest.mark.parametrize("bits, axis, group", CASES)
def test_bytes_are_the_packed_codes_and_two_float16_per_group(rng, bits, axis, group):
    x, codec, size = make(rng, bits, axis, group)
    coded = encode(x, codec)
    words_per_group = -(-size * bits // 32)
    assert nbytes(coded.data["words"]) == x.size // size * words_per_group * 4
    assert nbytes(coded) == x.size // size * (words_per_group * 4 + 4)
    if size * bits % 32 == 0:
        assert nbytes(coded.data["words"]) * 32 == nbytes(x) * bits


@pytest.mark.parametrize("axis", ["token", "channel"])
def test_constant_groups_come_back_as_their_float16_value(axis):
    value = np.array([0.0, 1.0, -2.5, 1000.0], np.float32)
    x = np.repeat(value, 8)[None, None]
    x = np.broadcast_to(x[..., None, :] if axis == "token" else x[..., None], (1, 1, 32, 32)).copy()
    back = decode(encode(jnp.asarray(x), Affine(2, axis=axis, group=8)))
    np.testing.assert_array_equal(back, x)


def test_groups_along_the_channel_axis_do_not_mix_channels(rng):
    x, codec, _ = make(rng, 2, "channel", 8)
    loud = x.at[..., 5].multiply(100.0)
    quiet, back = decode(encode(x, codec)), decode(encode(loud, codec))
    others = np.arange(SHAPE[-1]) != 5
    np.testing.assert_array_equal(back[..., others], quiet[..., others])


def test_groups_along_the_token_axis_do_not_mix_tokens(rng):
    x, codec, _ = make(rng, 4, "token", 16)
    quiet, back = decode(encode(x, codec)), decode(encode(x.at[:, :, 5].multiply(100.0), codec))
    others = np.arange(SHAPE[2]) != 5
    np.testing.assert_array_equal(back[:, :, others], quiet[:, :, others])


@pytest.mark.parametrize("kind, mantissa", [("e4m3", 3), ("e5m2", 2)])
def test_float8_keeps_its_relative_precision(rng, kind, mantissa):
    x = jnp.asarray(rng.normal(size=SHAPE) * 50, jnp.float32)
    back = np.asarray(decode(encode(x, Float8(kind))), np.float64)
    top = np.abs(np.asarray(x)).max(-1, keepdims=True)
    # Half a unit in the last place; values far below the token's largest fall into the subnormal range.
    tiny = top / (448 * 2.0**6 if kind == "e4m3" else 57344 * 2.0**14) * 2.0**-mantissa
    assert (np.abs(back - x) <= np.abs(x) * 2.0 ** -(mantissa + 1) * 1.01 + tiny).all()
    at = np.abs(np.asarray(x)).argmax(-1)
    largest = np.take_along_axis(back, at[..., None], -1)
    np.testing.assert_allclose(np.abs(largest), top, rtol=2e-3)


def test_float8_takes_a_byte_per_number_and_a_float16_per_token(rng):
    x = jnp.asarray(rng.normal(size=SHAPE), jnp.float32)
    assert nbytes(encode(x, Float8())) == x.size + x.size // SHAPE[-1] * 2
    np.testing.assert_array_equal(decode(encode(jnp.zeros(SHAPE), Float8())), np.zeros(SHAPE))


@pytest.mark.parametrize("codec", [Affine(4, group=16), Float8()], ids=str)
def test_codes_remember_the_dtype_they_decode_to(rng, codec):
    x = jnp.asarray(rng.normal(size=SHAPE), jnp.bfloat16)
    coded = encode(x, codec)
    assert isinstance(coded, Codes) and decode(coded).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(bits=3), "1, 2, 4 or 8"),
        (dict(bits=2, axis="row"), "axis"),
        (dict(bits=2, axis="channel"), "group"),
    ],
)
def test_impossible_codecs_are_refused_when_they_are_built(arguments, message):
    with pytest.raises(ValueError, match=message):
        Affine(**arguments)


def test_shapes_that_do_not_fit_a_codec_are_named():
    with pytest.raises(ValueError, match="5 tokens cannot be encoded 4 at a time"):
        encode(jnp.zeros((1, 1, 5, 8)), Affine(2, axis="channel", group=4))
    with pytest.raises(ValueError, match="group=5 must divide the 8 channels"):
        encode(jnp.zeros((1, 1, 5, 8)), Affine(2, group=5))
