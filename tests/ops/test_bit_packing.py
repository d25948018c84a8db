"""Sub-byte packing: exact round trips, and the bytes that the bit width says."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.base.bit_packing import pack, packed_words, unpack
from kvjax.state.cache import nbytes


def pack_by_hand(codes, bits):
    """Integer i takes bits i * bits .. (i + 1) * bits - 1 of one long little-endian bit string."""
    rows = codes.reshape(-1, codes.shape[-1])
    words = -(-codes.shape[-1] // (32 // bits))
    out = np.zeros((len(rows), words), np.uint32)
    for row, target in zip(rows, out, strict=True):
        number = sum(int(c) << (i * bits) for i, c in enumerate(row))
        target[:] = np.frombuffer(number.to_bytes(words * 4, "little"), "<u4")
    return out.reshape(*codes.shape[:-1], words)


@pytest.mark.rotating
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [32, 13])
def test_packing_is_little_endian_and_unpacks_exactly(rng, bits, count):
    codes = rng.integers(0, 2**bits, (3, 2, count)).astype(np.uint32)
    words = pack(jnp.asarray(codes), bits)
    np.testing.assert_array_equal(words, pack_by_hand(codes, bits))
    np.testing.assert_array_equal(unpack(words, bits, count), codes)
    assert words.shape[-1] == packed_words(count, bits)


@pytest.mark.parametrize("bits, share", [(1, 32), (2, 16), (4, 8), (8, 4)])
def test_packed_codes_take_their_share_of_float32_words(bits, share):
    codes = jnp.zeros((4, 64), jnp.uint32)
    assert nbytes(pack(codes, bits)) * share == nbytes(codes.astype(jnp.float32))
