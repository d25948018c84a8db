"""Short numbers in pairs in 32-bit words, inside a kernel: TPUs load no float16."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def halves(words: Any) -> tuple[Any, Any]:
    """(low, high) halves of words as float32: short numbers, as `kvjax.ops.base.bit_packing.short` says.

    A NaN there is some finite number here.

    The low half must not be negative. It holds scales, which are not, and leaving its sign out saves
    instructions.
    """
    bits = jax.lax.bitcast_convert_type(words, jnp.int32)
    low, high = (_widened(x & 0x0FFFE000) for x in (bits << 13, jax.lax.shift_right_logical(bits, 3)))
    sign = bits & jnp.int32(-(2**31))
    return low, jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(high, jnp.int32) | sign, jnp.float32
    )


def _widened(bits: Any) -> Any:
    """float32 of a float16 whose exponent and fraction have been shifted to where a float32 has its own.

    The exponents differ in their offset: 15 and 127. A float16 below 2^-14 is subnormal, it has no implied
    leading one; read as if it had one, it is 2^-14 too large. The smaller of both readings is the right one.
    Of the largest exponent the first four bits of the fraction are a number that is added to it, so all such
    numbers are finite: what lies in words that no token wrote must not spoil sums that give it no weight.
    """
    normal, small = (jax.lax.bitcast_convert_type(bits + (n << 23), jnp.float32) for n in (112, 113))
    # The largest exponent's own bits leave to the left, and 143, that of 2^16, takes their place.
    large = jax.lax.bitcast_convert_type((bits << 4) + 0x4F800000, jnp.float32)
    return jnp.where(bits >= (31 << 23), large, jnp.minimum(normal, small - 2.0**-14))
