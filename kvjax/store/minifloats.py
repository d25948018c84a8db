"""Floating-point numbers of 4 to 8 bits as integers: formats, the nearest number, and powers of two."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


class MiniFloat(NamedTuple):
    """A sign, an exponent and a fraction of `fraction` bits, with subnormal numbers and no infinity.

    bits: the total. least: the exponent of the smallest normal number. top: the code of the largest number
    without its sign, to which larger numbers are clipped.
    """

    bits: int
    fraction: int
    least: int
    top: int

    @property
    def most(self) -> int:
        """The exponent of the largest number."""
        return (self.top >> self.fraction) - 1 + self.least

    @property
    def largest(self) -> float:
        """The largest number.

        >>> [FORMATS[kind].largest for kind in ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")]
        [448.0, 57344.0, 7.5, 28.0, 6.0]
        """
        return (1 + (self.top % 2**self.fraction) / 2**self.fraction) * 2.0**self.most


# OCP's formats (OCP 8-bit Floating Point Specification; OCP Microscaling Formats, version 1.0, table 1). The
# codes above e4m3's and e5m2's largest number are infinite or no numbers.
FORMATS = {
    "e4m3": MiniFloat(8, 3, -6, 0x7E),
    "e5m2": MiniFloat(8, 2, -14, 0x7B),
    "e2m3": MiniFloat(6, 3, 0, 0x1F),
    "e3m2": MiniFloat(6, 2, -2, 0x1F),
    "e2m1": MiniFloat(4, 1, 0, 0x7),
}


def exponent(x: Float[Array, "*b"]) -> Int[Array, "*b"]:
    """floor(log2 |x|) of float32 numbers; -127 if this is below -126, and for 0."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return ((bits >> jnp.uint32(23)) & jnp.uint32(0xFF)).astype(jnp.int32) - 127


def power(e: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """2^e in float32, for e from -126 to 127; exact, which `exp2` need not be."""
    return jax.lax.bitcast_convert_type((e.astype(jnp.int32) + 127) << 23, jnp.float32)


def to_codes(x: Float[Array, "*b"], kind: MiniFloat) -> UInt32[Array, "*b"]:
    """Encode x by the nearest codes of the numbers of a format; halfway, by the even one."""
    size = jnp.minimum(jnp.abs(x.astype(jnp.float32)), kind.largest)
    at = jnp.maximum(exponent(size), kind.least)
    # A fraction that is rounded up to 2 is the next exponent's first code.
    steps = jnp.round(size / power(at - kind.fraction)).astype(jnp.int32)
    code = (((at - kind.least) << kind.fraction) + steps).astype(jnp.uint32)
    return code | (jnp.signbit(x).astype(jnp.uint32) << jnp.uint32(kind.bits - 1))


def of_codes(codes: UInt32[Array, "*b"], kind: MiniFloat) -> Float[Array, "*b"]:
    """Decode codes to float32 numbers."""
    code = (codes & jnp.uint32(2 ** (kind.bits - 1) - 1)).astype(jnp.int32)
    over = jnp.maximum((code >> kind.fraction) - 1, 0)
    size = (code - (over << kind.fraction)).astype(jnp.float32) * power(over + kind.least - kind.fraction)
    return jnp.where(codes >> jnp.uint32(kind.bits - 1) == 1, -size, size)
