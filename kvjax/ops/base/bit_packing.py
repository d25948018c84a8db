"""Sub-byte integers packed into uint32 words, so that codes really take the bytes that are claimed.

Words are packed along channels (`pack`), so that a token can be appended by itself, or along tokens
(`pack_tokens`), so that a word belongs to one channel and an accelerator reads rows as wide as a head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32


def _planes(bits: int) -> list[tuple[int, int]]:
    """Return (size, first bit) of the powers of two whose sum is `bits`, the largest first: 3 is 2 and 1."""
    sizes = [1 << i for i in reversed(range(bits.bit_length())) if bits >> i & 1]
    return [(size, sum(sizes[:i])) for i, size in enumerate(sizes)]


def packed_words(count: int, bits: int) -> int:
    """How many words `count` integers of `bits` bits take."""
    return sum(-(-count // (32 // size)) for size, _ in _planes(bits))


def pack(codes: UInt32[Array, "*b n"], bits: int) -> UInt32[Array, "*b w"]:
    """Little-endian packing along the last axis; the tail of the last word is 0.

    If 32 is not a multiple of `bits`, words with the lower bits of all integers come first, then words with
    the upper bits: 3 bits are packed as 2 and 1.

    >>> import jax.numpy as jnp
    >>> pack(jnp.array([1, 2, 3], jnp.uint32), 8)
    Array([197121], dtype=uint32)
    >>> pack(jnp.array([1, 2, 7], jnp.uint32), 3)
    Array([57,  4], dtype=uint32)
    """
    if len(planes := _planes(bits)) > 1:
        parts = [pack((codes >> jnp.uint32(low)) & jnp.uint32(2**n - 1), n) for n, low in planes]
        return jnp.concatenate(parts, -1)
    per = 32 // bits
    n = codes.shape[-1]
    words = packed_words(n, bits)
    padded = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, words * per - n)])
    parts = padded.reshape(*codes.shape[:-1], words, per) << _shifts(bits, codes.ndim)
    return parts.sum(-1, dtype=jnp.uint32)


def _shifts(bits: int, before: int) -> Array:
    shifts = jnp.arange(32 // bits, dtype=jnp.uint32) * jnp.uint32(bits)
    return shifts.reshape((1,) * before + (-1,))


def unpack(words: UInt32[Array, "*b w"], bits: int, count: int) -> UInt32[Array, "*b n"]:
    """Unpack the first `count` integers of `pack`."""
    if len(planes := _planes(bits)) > 1:
        whole, at = jnp.uint32(0), 0
        for size, low in planes:
            end = at + packed_words(count, size)
            whole = whole | (unpack(words[..., at:end], size, count) << jnp.uint32(low))
            at = end
        return whole
    per = 32 // bits
    parts = (words[..., None] >> _shifts(bits, words.ndim)) & jnp.uint32(2**bits - 1)
    return parts.reshape(*words.shape[:-1], words.shape[-1] * per)[..., :count]


def pack_tokens(codes: UInt32[Array, "*b S H"], bits: int) -> UInt32[Array, "*b w H"]:
    """Pack S tokens of every channel in words of 1, 2 or 4 bits a token; the last word is zero-padded.

    A word holds 8 numbers of 4 bits, which are 8 consecutive tokens, or for 2 bits (1 bit) one token from
    each of 2 (4) planes: plane j is the j-th part of all S, at bits j (2 j) of a number. So matrix units get
    numbers of 4 bits, which they can widen, after one shift and one mask per plane.

    >>> import jax.numpy as jnp
    >>> pack_tokens(jnp.array([[1], [2], [3]], jnp.uint32), 4)
    Array([[801]], dtype=uint32)
    """
    *batch, tokens, h = codes.shape
    planes, words = 4 // bits, packed_words(tokens, bits)
    pad = words * planes * 8 - tokens
    padded = jnp.pad(codes, [(0, 0)] * len(batch) + [(0, pad), (0, 0)])
    parts = padded.reshape(*batch, planes, words, 8, h) << _plane_shifts(bits, len(batch))
    return parts.sum((-4, -2), dtype=jnp.uint32)


def unpack_tokens(words: UInt32[Array, "*b w H"], bits: int, tokens: int) -> UInt32[Array, "*b S H"]:
    """Unpack the first `tokens` integers of every channel of `pack_tokens`."""
    *batch, count, h = words.shape
    parts = (words[..., None, :, None, :] >> _plane_shifts(bits, len(batch))) & jnp.uint32(2**bits - 1)
    return parts.reshape(*batch, -1, h)[..., :tokens, :]


def _plane_shifts(bits: int, before: int) -> Array:
    """Return the shift of each number of a word: [planes, 1, 8, 1] after `before` axes of size 1."""
    plane = jnp.arange(4 // bits, dtype=jnp.uint32)[:, None] * jnp.uint32(bits)
    number = jnp.arange(8, dtype=jnp.uint32)[None] * jnp.uint32(4)
    return (plane + number).reshape((1,) * before + (4 // bits, 1, 8, 1))


# Short numbers beyond the largest float16: 16 powers of two above 2^16, 64 steps in each, the last one
# unused.
LARGEST_SHORT = (2 - 2.0**-5) * 2.0**31
_EXPONENT, _FRACTION = 0x7C00, 0x03FF
_STEPS = 17  # float32 has this many fraction bits more than such a number
_FIRST = 143 << 6  # the exponent and the first six bits of 2^16


def short(x: Float[Array, "*b"], outward: bool | None = None) -> UInt32[Array, "*b"]:
    """Encode the 16 bits of a short number: float16, except that codes of inf and NaN are numbers up to 2^32.

    Numbers beyond float16's range have six bits of fraction. outward: rounds these away from 0 (True),
    towards 0 (False) or to nearest (None). Beyond `LARGEST_SHORT` the result is NaN.

    >>> [float(of_short(short(jnp.float32(x)))) for x in (0.1, -65504.0, -100000.0, 1e6)]
    [0.0999755859375, -65504.0, -100352.0, 999424.0]
    """
    x = x.astype(jnp.float32)
    size = jnp.abs(x)
    large = ~(size < 65520.0)  # what float16 rounds to infinity
    half = jax.lax.bitcast_convert_type(jnp.where(large, 0.0, x).astype(jnp.float16), jnp.uint16)
    bits = jax.lax.bitcast_convert_type(jnp.clip(size, 2.0**16, LARGEST_SHORT), jnp.uint32)
    up = {None: 1 << (_STEPS - 1), True: (1 << _STEPS) - 1, False: 0}[outward]
    steps = ((bits + jnp.uint32(up)) >> jnp.uint32(_STEPS)) - jnp.uint32(_FIRST)
    steps = jnp.minimum(steps, jnp.uint32(_FRACTION - 1))
    far = jnp.uint32(_EXPONENT) + jnp.where(size <= LARGEST_SHORT, steps, jnp.uint32(_FRACTION))
    sign = (x < 0).astype(jnp.uint32) << jnp.uint32(15)
    return jnp.where(large, far | sign, half.astype(jnp.uint32))


def of_short(bits: UInt32[Array, "*b"]) -> Float[Array, "*b"]:
    """Decode the float32 numbers of codes by `short`."""
    half = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16).astype(jnp.float32)
    large = (bits & jnp.uint32(_EXPONENT)) == _EXPONENT
    steps = bits & jnp.uint32(_FRACTION)
    far = jax.lax.bitcast_convert_type((steps + jnp.uint32(_FIRST)) << jnp.uint32(_STEPS), jnp.float32)
    far = jnp.where(steps == _FRACTION, jnp.nan, far)
    sign = jnp.where((bits >> jnp.uint32(15)) & jnp.uint32(1) == 1, -1.0, 1.0)
    return jnp.where(large, sign * far, half)


def pair(low: UInt32[Array, "*b"], high: UInt32[Array, "*b"]) -> UInt32[Array, "*b"]:
    """Pack two short numbers (`short`) into one 32-bit word, because a TPU cannot load float16.

    >>> hex(pair(short(jnp.float32(1)), short(jnp.float32(-2))))
    '0xc0003c00'
    """
    return low | (high << jnp.uint32(16))


def halves(words: UInt32[Array, "*b"]) -> tuple[Float[Array, "*b"], Float[Array, "*b"]]:
    """Split `pair` into its two numbers, in float32."""
    return of_short(words & jnp.uint32(0xFFFF)), of_short(words >> jnp.uint32(16))
