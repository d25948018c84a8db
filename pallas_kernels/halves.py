"""Float16 numbers in pairs in 32-bit words, inside a kernel: TPUs load no float16."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def halves(words: Any) -> tuple[Any, Any]:
    """(low, high) halves of words as float32; what is infinite or no number comes as some finite number.

    The low half must not be negative, as scales are not: that saves instructions where they count.
    """
    bits = jax.lax.bitcast_convert_type(words, jnp.int32)
    low, high = (_widened(x & 0x0FFFE000) for x in (bits << 13, jax.lax.shift_right_logical(bits, 3)))
    sign = bits & jnp.int32(-(2**31))
    return low, jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(high, jnp.int32) | sign, jnp.float32
    )


def _widened(bits: Any) -> Any:
    """float32 of a float16's 5 bits of exponent and 10 of fraction, shifted to where a float32 has its own.

    Exponents count from 15 there and from 127 here. Numbers below 2^-14 have no leading one: with one they
    are too large by what is subtracted, and other numbers would be larger yet.
    """
    normal, small = (jax.lax.bitcast_convert_type(bits + (n << 23), jnp.float32) for n in (112, 113))
    return jnp.minimum(normal, small - 2.0**-14)
