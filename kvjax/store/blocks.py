"""Blocks of channels that share a power of two: OCP's microscaling formats, and shared microexponents.

These are formats that tensor units of accelerators multiply directly. A block is in one token, so tokens are
encoded one by one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped, UInt8, UInt32

from kvjax.base.checks import is_whole
from kvjax.ops.base.bit_packing import pack, unpack
from kvjax.state.codes import Codec
from kvjax.store.minifloats import FORMATS, exponent, of_codes, power, to_codes

# The smallest power of two that is a normal float32; the format's own smallest is half of that.
_LEAST = -126


def blocked(x: Shaped[Array, "*b H"], block: int) -> Shaped[Array, "*b groups block"]:
    """Return x with an axis for its blocks. ValueError if a block does not divide the channels."""
    if x.shape[-1] % block:
        raise ValueError(f"block={block} must divide the {x.shape[-1]} channels of a head")
    return x.reshape(*x.shape[:-1], -1, block)


def check_block(block: Any) -> None:
    if not is_whole(block):
        raise ValueError(f"a block is a whole number of channels, at least 1, got {block!r}")


def stored(codes: UInt32[Array, "*b H"], bits: int) -> dict[str, Array]:
    """Codes as bytes, or packed in words."""
    return {"codes": codes.astype(jnp.uint8)} if bits == 8 else {"words": pack(codes, bits)}


def found(data: dict[str, Array], bits: int, width: int) -> UInt32[Array, "*b H"]:
    """Return the codes of `stored`."""
    return data["codes"].astype(jnp.uint32) if bits == 8 else unpack(data["words"], bits, width)


def _biased(e: Int[Array, "*b"]) -> UInt8[Array, "*b"]:
    return (e + 127).astype(jnp.uint8)


def _unbiased(e: UInt8[Array, "*b"]) -> Int[Array, "*b"]:
    return e.astype(jnp.int32) - 127


@dataclasses.dataclass(frozen=True)
class Microscaled(Codec):
    """x ~ 2^e p: a number p of format `kind` per channel, and a power of two per `block` channels of a token.

    e = floor(log2 max |x|) of a block less the exponent of the format's largest number, and p is the number
    of the format nearest to x / 2^e, even halfway; larger numbers are clipped (OCP Microscaling
    Formats, version 1.0, section 6.3; Rouhani et al., 2023, arXiv:2310.10537, algorithm 1). kind: "e4m3" and
    "e5m2" (MXFP8), "e2m3" and "e3m2" (MXFP6), "e2m1" (MXFP4), or "int8", 64 p a whole number from -127 to 127
    (MXINT8). Stored are "scales" uint8 [*b, S, H / block], e + 127, and codes of 4, 6 or 8 bits. Raises
    ValueError for other kinds and blocks.

    >>> codec = Microscaled("e2m1", 4)
    >>> codec.decode(codec.encode(jnp.array([[1.0, 2.4, -3.1, 9.0]])), 4, jnp.float32).tolist()
    [[1.0, 2.0, -3.0, 8.0]]
    """

    kind: Literal["e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "int8"]
    block: int = 32

    granule = 1

    def __post_init__(self):
        if self.kind not in (*FORMATS, "int8"):
            raise ValueError(f"kind must be one of {', '.join((*FORMATS, 'int8'))}, got {self.kind!r}")
        check_block(self.block)

    @property
    def bits(self) -> int:
        return 8 if self.kind == "int8" else FORMATS[self.kind].bits

    @property
    def says(self) -> str:
        return f"{self.kind}, {self.bits} bits a number, with a power of two for {self.block} channels."

    def power(self, largest: Float[Array, "*b"]) -> Int[Array, "*b"]:
        """Find the exponent e of blocks with these largest magnitudes."""
        return exponent(largest) - (0 if self.kind == "int8" else FORMATS[self.kind].most)

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        rows = blocked(x.astype(jnp.float32), self.block)
        e = jnp.clip(self.power(jnp.abs(rows).max(-1)), _LEAST, 127)
        scaled = (rows / power(e)[..., None]).reshape(x.shape)
        if self.kind == "int8":
            codes = jnp.clip(jnp.round(scaled * 64), -127, 127).astype(jnp.int8)
            return {"scales": _biased(e), "codes": codes}
        return {"scales": _biased(e), **stored(to_codes(scaled, FORMATS[self.kind]), self.bits)}

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        if self.kind == "int8":
            p = data["codes"].astype(jnp.float32) / 64
        else:
            p = of_codes(found(data, self.bits, width), FORMATS[self.kind])
        rows = blocked(p, self.block) * power(_unbiased(data["scales"]))[..., None]
        return rows.reshape(p.shape).astype(dtype)


@dataclasses.dataclass(frozen=True)
class NearestPower(Microscaled):
    """Microscaled, with the power of two whose logarithm is nearest to that of `part` max |x|.

    e = floor(log2(part max |x|) + 1/2) of a block, where `Microscaled` rounds the logarithm down (UltraQuant,
    arXiv:2606.20474). Raises ValueError if `part` is not positive.

    >>> codec = NearestPower("e2m1", 4, part=0.156)
    >>> codec.decode(codec.encode(jnp.array([[1.0, 2.4, -3.1, 9.0]])), 4, jnp.float32).tolist()
    [[1.0, 2.0, -3.0, 6.0]]
    """

    part: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        if not self.part > 0:
            raise ValueError(f"part is a positive share of a block's largest number, got {self.part!r}")

    def power(self, largest: Float[Array, "*b"]) -> Int[Array, "*b"]:
        return exponent(largest * (self.part * 2**0.5))


@dataclasses.dataclass(frozen=True)
class SharedExponents(Codec):
    """x ~ +-m 2^(e - t - fraction + 1): integers m below 2^fraction, e per block, t per pair of channels.

    e is the exponent of the largest of `block` channels of a token, and t a bit of every two of them, 1 if
    both are below 2^e (Rouhani et al., 2023, arXiv:2302.08007, section 3): with blocks of 16, `fraction`=7 is
    MX9, 4 is MX6 and 2 is MX4. Stored are "scales" uint8 [*b, S, H / block], e + 127, and words of the t and
    of signs and m. Raises ValueError for other fractions, and for blocks that are odd or do not divide rows.

    >>> codec = SharedExponents(2, 4)
    >>> codec.decode(codec.encode(jnp.array([[5.0, -1.0, 1.2, 0.4]])), 4, jnp.float32).tolist()
    [[4.0, -0.0, 1.0, 0.0]]
    """

    fraction: int
    block: int = 16

    granule = 1

    def __post_init__(self):
        if self.fraction not in range(1, 8):
            raise ValueError(f"a fraction has 1 to 7 bits, got {self.fraction!r}: MX9 has 7, MX6 4, MX4 2")
        check_block(self.block)
        if self.block % 2:
            raise ValueError(f"a block of pairs has an even number of channels, got {self.block}")

    @property
    def says(self) -> str:
        return f"{self.fraction + 1} bits a number, a bit for two, a power of two for {self.block} channels."

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        rows = blocked(x.astype(jnp.float32), self.block)
        at = exponent(jnp.abs(rows))
        # Numbers below the smallest power of two are stored as 0.
        e = jnp.maximum(at.max(-1, keepdims=True), _LEAST + self.fraction)
        pairs = at.reshape(*at.shape[:-1], -1, 2).max(-1)
        lower = (pairs < e).astype(jnp.int32)
        step = power(e - jnp.repeat(lower, 2, -1) - (self.fraction - 1))
        m = jnp.minimum(jnp.round(jnp.abs(rows) / step), 2**self.fraction - 1).astype(jnp.uint32)
        codes = m | (jnp.signbit(rows).astype(jnp.uint32) << jnp.uint32(self.fraction))
        return {
            "scales": _biased(e[..., 0]),
            "lower": pack(lower.astype(jnp.uint32).reshape(*x.shape[:-1], -1), 1),
            **stored(codes.reshape(x.shape), self.fraction + 1),
        }

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        codes = blocked(found(data, self.fraction + 1, width), self.block)
        lower = jnp.repeat(unpack(data["lower"], 1, width // 2).astype(jnp.int32), 2, -1)
        e = _unbiased(data["scales"])[..., None] - blocked(lower, self.block)
        # All arrays of an empty slot are zeros, which say a scale of 2^-127: that is no normal float32.
        step = power(jnp.maximum(e - (self.fraction - 1), _LEAST))
        size = (codes & jnp.uint32(2**self.fraction - 1)).astype(jnp.float32) * step
        rows = jnp.where(codes >> jnp.uint32(self.fraction) == 1, -size, size)
        return rows.reshape(*rows.shape[:-2], width).astype(dtype)
