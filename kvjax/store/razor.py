"""Integers of which only the leading bits are kept, the same for a group of channels (QRazor)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.base.checks import is_whole
from kvjax.ops.base.bit_packing import pack, unpack
from kvjax.state.codes import Codec
from kvjax.store.minifloats import exponent, power


@dataclasses.dataclass(frozen=True)
class Razor(Codec):
    """x ~ scale sign m 2^cut: the sign and the `bits` - 1 leading bits m of integers of `base` bits.

    scale is max |x| / (2^(base - 1) - 1) of a token. cut is the number of low bits removed from the numbers
    of `group` channels, so that the largest of them keeps `bits` - 1 bits. Numbers are rounded to the kept
    bits, but never up into one more bit (arXiv:2501.13331, section 4). Stored are words of `bits` bits,
    "cuts" in 4 bits each, and "scale" float32 [*b, S, 1]. Raises ValueError for bits outside 2 to `base`, and
    for a group that does not divide the channels.

    >>> codec = Razor(4, group=2)
    >>> codec.decode(codec.encode(jnp.array([[127.0, -40.0, 3.0, 5.0]])), 4, jnp.float32).tolist()
    [[112.0, -48.0, 3.0, 5.0]]
    """

    bits: int = 4
    base: int = 8
    group: int = 16

    granule = 1

    def __post_init__(self):
        if not is_whole(self.base, 3, 16):
            raise ValueError(f"base numbers have 3 to 16 bits, got {self.base!r}")
        if not is_whole(self.bits, 2, self.base):
            raise ValueError(f"of {self.base} bits 2 to {self.base} stay, got {self.bits!r}")
        if not is_whole(self.group):
            raise ValueError(f"a group is a number of channels, at least 1, got {self.group!r}")

    @property
    def says(self) -> str:
        return f"The {self.bits} leading bits of {self.base}-bit numbers, for {self.group} channels alike."

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        if x.shape[-1] % self.group:
            raise ValueError(f"group={self.group} must divide the {x.shape[-1]} channels of a head")
        most = 2 ** (self.base - 1) - 1
        rows = x.astype(jnp.float32)
        scale = jnp.abs(rows).max(-1, keepdims=True) / most
        whole = jnp.clip(jnp.round(rows / jnp.where(scale == 0, 1.0, scale)), -most, most)
        groups = whole.reshape(*x.shape[:-1], -1, self.group)
        # 2^e <= the largest number, which has e + 1 bits.
        cuts = jnp.maximum(exponent(jnp.abs(groups).max(-1)) + 1 - (self.bits - 1), 0)
        top = 2 ** (self.bits - 1) - 1
        m = jnp.minimum(jnp.floor(jnp.abs(groups) / power(cuts)[..., None] + 0.5), top).astype(jnp.uint32)
        codes = m | ((groups < 0).astype(jnp.uint32) << jnp.uint32(self.bits - 1))
        words = pack(codes.reshape(x.shape), self.bits)
        return {"words": words, "cuts": pack(cuts.astype(jnp.uint32), 4), "scale": scale}

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        codes = unpack(data["words"], self.bits, width)
        cuts = unpack(data["cuts"], 4, width // self.group).astype(jnp.int32)
        size = (codes & jnp.uint32(2 ** (self.bits - 1) - 1)).astype(jnp.float32)
        size = size * jnp.repeat(power(cuts), self.group, -1) * data["scale"]
        return jnp.where(codes >> jnp.uint32(self.bits - 1) == 1, -size, size).astype(dtype)
