"""Pairs of short numbers in 32-bit words, inside a kernel: TPUs cannot load float16."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def halves(words: Any) -> tuple[Any, Any]:
    """Return (low, high) halves of words as float32: short numbers of `kvjax.ops.base.bit_packing.short`.

    A NaN becomes some finite number.

    The low half must not be negative. It holds scales, which are not, and ignoring its sign saves
    instructions.
    """
    bits = jax.lax.bitcast_convert_type(words, jnp.int32)
    low, high = (_widened(x & 0x0FFFE000) for x in (bits << 13, jax.lax.shift_right_logical(bits, 3)))
    sign = bits & jnp.int32(-(2**31))
    return low, jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(high, jnp.int32) | sign, jnp.float32
    )


def _widened(bits: Any) -> Any:
    """Widen a float16 to float32, given exponent and fraction already shifted to their float32 places.

    The exponents differ in their offset: 15 and 127. A float16 below 2^-14 is subnormal, it has no implied
    leading one; read as if it had one, it is 2^-14 too large. The smaller of both readings is the right one.
    For the largest exponent, the first four bits of the fraction are added to the exponent, so all such
    numbers are finite: unwritten words must not spoil sums in which their weight is 0.
    """
    normal, small = (jax.lax.bitcast_convert_type(bits + (n << 23), jnp.float32) for n in (112, 113))
    # The largest exponent's own bits are shifted out, and 143, that of 2^16, replaces them.
    large = jax.lax.bitcast_convert_type((bits << 4) + 0x4F800000, jnp.float32)
    return jnp.where(bits >= (31 << 23), large, jnp.minimum(normal, small - 2.0**-14))
