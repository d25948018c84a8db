"""Codecs against quantisers written in numpy from their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.base.bit_packing import pack, pack_tokens, packed_words, unpack, unpack_tokens
from kvjax.state import codes
from kvjax.state.cache import nbytes
from kvjax.state.code_forms import Form, form_of, groups_of, is_rows
from kvjax.state.codes import Codes
from kvjax.store.affine import Affine, Float8

encode = jax.jit(codes.encode, static_argnames="codec")
decode = jax.jit(Codes.decode)
SHAPE = (2, 3, 16, 32)  # batch, heads, tokens, channels


def rows_of(x, axis, group):
    """Group the last axis: [.., S, H / group, group] by token, [.., S / group, H, group] by channel."""
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


# bits, axis, group, tokens that share words.
CASES = [
    (8, "token", None, 1), (4, "token", 16, 1), (4, "token", None, 8), (2, "token", 8, 1), (2, "token", 8, 8),
    (1, "token", 16, 4), (8, "channel", 8, 1), (4, "channel", 16, 1), (2, "channel", 8, 1),
    (1, "channel", 8, 1),
]  # fmt: skip


def make(rng, bits, axis, group, together=1, scale=1.0):
    x = jnp.asarray(rng.normal(size=SHAPE) * scale, jnp.float32)
    return x, Affine(bits, axis=axis, group=group, together=together), group or SHAPE[-1]


def stored(numbers, axis, together):
    """One number per group [.., S, groups] or [.., S / group, H] in the order they are stored in."""
    if axis == "channel":
        return numbers
    if together == 1:
        return numbers[..., 0] if numbers.shape[-1] == 1 else numbers
    *batch, s, groups = numbers.shape
    split = numbers.reshape(*batch, s // together, together, groups)
    return split.swapaxes(-1, -2).reshape(*batch, s // together, -1)


@pytest.mark.parametrize("bits, axis, group, together", CASES)
def test_affine_equals_a_quantiser_by_hand(rng, bits, axis, group, together):
    x, codec, size = make(rng, bits, axis, group, together)
    coded = encode(x, codec)
    codes, scale, zero = affine_by_hand(x, bits, axis, size)
    # Little-endian: the low half of a word comes first.
    words = np.asarray(coded.data["scale_zero"], "<u4")
    numbers = np.ascontiguousarray(words[..., None]).view("<f2")
    np.testing.assert_array_equal(numbers[..., 0], stored(scale, axis, together))
    np.testing.assert_array_equal(numbers[..., 1], stored(zero, axis, together))
    want = codes * scale.astype(np.float64)[..., None] + zero.astype(np.float64)[..., None]
    np.testing.assert_allclose(decode(coded), tokens_of(want, axis), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axis", ["token", "channel"])
def test_a_clipped_range_is_that_part_of_the_least_and_the_largest(rng, axis):
    x = rng.normal(size=SHAPE) + np.linspace(-1, 1, SHAPE[-1])
    back = decode(encode(jnp.asarray(x, jnp.float32), Affine(4, axis=axis, group=16, clip=0.9)))
    rows = rows_of(x, axis, 16)
    low, high = 0.9 * rows.min(-1, keepdims=True), 0.9 * rows.max(-1, keepdims=True)
    step = (high - low) / 15
    want = np.clip(np.rint((rows - low) / step), 0, 15) * step + low
    # float16 rounds the scale and the zero, and so a code now and then.
    off = np.abs(np.asarray(back) - tokens_of(want, axis))
    assert np.median(off) < 2e-3 and off.max() < 1.01 * step.max() and (off > 0.01).mean() < 0.01
    for given in (0, -0.5, 1.5):
        with pytest.raises(ValueError, match=r"clip is a part of a group's range in \(0, 1\], got"):
            Affine(4, clip=given)


@pytest.mark.parametrize("bits, axis, group, together", CASES)
def test_the_error_is_at_most_half_a_step_and_the_rounding_of_the_ends(rng, bits, axis, group, together):
    x, codec, size = make(rng, bits, axis, group, together, scale=3.0)
    error = np.abs(np.asarray(decode(encode(x, codec)), np.float64) - np.asarray(x))
    rows = rows_of(np.asarray(x, np.float64), axis, size)
    span = rows.max(-1) - rows.min(-1)
    step = span / (2**bits - 1)
    # float16 keeps 11 bits: of the zero point, and of the step that is taken up to 2^bits - 1 times.
    ends = 2.0**-11 * (np.abs(rows).max(-1) + span)
    bound = np.broadcast_to((step * (0.5 + 2.0**-11) + ends)[..., None], rows.shape)
    assert (rows_of(error, axis, size) <= bound).all()


@pytest.mark.parametrize("bits, axis, group, together", CASES)
def test_bytes_are_the_packed_codes_and_two_float16_per_group(rng, bits, axis, group, together):
    x, codec, size = make(rng, bits, axis, group, together)
    coded = encode(x, codec)
    # Words hold tokens of one channel where these are encoded together, else channels of one token.
    run = codec.granule if codec.granule > 1 else size
    codes = x.size // run * -(-run * bits // 32) * 4
    assert nbytes(coded.data["codes" if bits == 8 else "words"]) == codes
    assert nbytes(coded) == codes + x.size // size * 4
    if run * bits % 32 == 0:
        assert codes * 32 == nbytes(x) * bits


@pytest.mark.parametrize("bits, axis, group, together", CASES)
def test_every_array_has_its_slots_on_the_axis_of_the_tokens(rng, bits, axis, group, together):
    """Granules can then be written, padded and read page by page, whatever the codec."""
    x, codec, _ = make(rng, bits, axis, group, together)
    whole, g = encode(x, codec), codec.granule
    for granule in range(x.shape[2] // g):
        one = encode(x[:, :, granule * g : (granule + 1) * g], codec)
        for name, part in one.data.items():
            rows = part.shape[2]
            assert whole.data[name].shape[2] * g == rows * x.shape[2]
            np.testing.assert_array_equal(whole.data[name][:, :, granule * rows : (granule + 1) * rows], part)


def test_words_of_tokens_hold_numbers_of_four_bits_in_planes(rng):
    """Token 8 w + i + 8 W j of a channel is bits 4 i + bits j of word w of W."""
    for bits in (1, 2, 4):
        codes = rng.integers(0, 2**bits, (64, 3))
        words = np.asarray(pack_tokens(jnp.asarray(codes, jnp.uint32), bits))
        for token in range(64):
            plane, at = divmod(token, 8 * len(words))
            word, number = divmod(at, 8)
            found = words[word] >> np.uint32(4 * number + bits * plane) & np.uint32(2**bits - 1)
            np.testing.assert_array_equal(found, codes[token])
        np.testing.assert_array_equal(unpack_tokens(jnp.asarray(words), bits, 64), codes)


def test_words_of_three_bits_hold_two_of_every_number_and_then_the_third(rng):
    codes = rng.integers(0, 8, (3, 40))
    words = np.asarray(pack(jnp.asarray(codes, jnp.uint32), 3))
    assert words.shape == (3, 3 + 2) and packed_words(40, 3) == 5
    for i in range(40):
        low = words[:, i // 16] >> np.uint32(2 * (i % 16)) & np.uint32(3)
        high = words[:, 3 + i // 32] >> np.uint32(i % 32) & np.uint32(1)
        np.testing.assert_array_equal(low + 4 * high, codes[:, i])
    np.testing.assert_array_equal(unpack(jnp.asarray(words), 3, 40), codes)


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
        (dict(bits=2, axis="channel", group=8, together=8), "together"),
        (dict(bits=2, together=0), "together"),
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


# codec, whether a kernel reads its codes as rows, and in which groups those of keys and values.
FORMS = [
    (Affine(8), True, None), (Affine(8, group=32), True, None), (Affine(8, group=16), False, None),
    (Affine(8, together=8), False, None), (Affine(8, axis="channel", group=8), False, None),
    (Affine(4), False, None), (Affine(4, group=16, together=8), False, None), (Float8(), False, None),
    (Affine(4, axis="channel", group=16), False, "key groups"),
    (Affine(4, group=16, together=16), False, "value groups"),
]  # fmt: skip


@pytest.mark.parametrize("codec, rows, groups", FORMS)
def test_a_codec_says_which_kernel_reads_its_codes(codec, rows, groups):
    coded = jax.eval_shape(lambda: codes.encode(jnp.zeros(SHAPE), codec))
    assert is_rows(coded) == rows
    if rows:
        assert set(coded.data) == {"codes", "scale_zero"} and coded.data["scale_zero"].shape == SHAPE[:3]
    elif groups is None:
        assert not hasattr(codec, "form") or form_of(coded) is None
    else:
        assert form_of(coded) == Form(groups, 4, 16)


def test_keys_and_values_are_read_together_where_their_groups_are_the_same():
    def coded(codec):
        return jax.eval_shape(lambda: codes.encode(jnp.zeros(SHAPE), codec))

    keys, values = Affine(4, axis="channel", group=16), Affine(4, group=16, together=16)
    assert groups_of(coded(keys), coded(values)) == Form("key groups", 4, 16)
    assert groups_of(coded(values), coded(keys)) is None and groups_of(coded(keys), None) is None
    for other in (Affine(2, group=16, together=16), Affine(4, group=8, together=8), Affine(8)):
        assert groups_of(coded(keys), coded(other)) is None
