"""Integers times a scale, without a zero point: what servers store per token and head."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.base.checks import is_whole
from kvjax.ops.base.bit_packing import pack, unpack
from kvjax.state.codes import Codec


@dataclasses.dataclass(frozen=True)
class Symmetric(Codec):
    """x ~ code * scale, with scale = max |x| / (2^(bits - 1) - 1) of `group` channels of a token, or of all.

    Codes are whole numbers of `bits` bits, as many below 0 as above. Stored are int8 [*b, S, H], or words of
    fewer bits, and "scale" float32 [*b, S, groups]. Raises ValueError for other bits than 2 to 8, and for a
    group that does not divide the channels.

    >>> codec = Symmetric(3)
    >>> codec.decode(codec.encode(jnp.array([[1.1, -3.0, 0.4]])), 3, jnp.float32).tolist()
    [[1.0, -3.0, 0.0]]
    """

    bits: int
    group: int | None = None

    granule = 1

    def __post_init__(self):
        if not is_whole(self.bits, 2, 8):
            raise ValueError(f"codes around 0 have 2 to 8 bits, got {self.bits!r}")
        if self.group is not None and not is_whole(self.group):
            raise ValueError(f"a group is a number of channels, at least 1, or None, got {self.group!r}")

    @property
    def says(self) -> str:
        return f"{self.bits} bits a number around 0, and a float32 scale for {self.group or 'all'} channels."

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        codes, scale = self.whole(x)
        if self.bits == 8:
            return {"codes": codes.astype(jnp.int8), "scale": scale}
        return {"words": pack((codes + self._most).astype(jnp.uint32), self.bits), "scale": scale}

    def whole(self, x: Float[Array, "*b S H"]) -> tuple[Array, Float[Array, "*b S groups"]]:
        """Codes as whole float32 numbers, and their scales."""
        group = self.group or x.shape[-1]
        if x.shape[-1] % group:
            raise ValueError(f"group={group} must divide the {x.shape[-1]} channels of a head")
        rows = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, group)
        scale = jnp.abs(rows).max(-1) / self._most
        step = jnp.where(scale == 0, 1.0, scale)[..., None]
        return jnp.clip(jnp.round(rows / step), -self._most, self._most).reshape(x.shape), scale

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        if "codes" in data:
            codes = data["codes"].astype(jnp.float32)
        else:
            codes = unpack(data["words"], self.bits, width).astype(jnp.float32) - self._most
        scale = data["scale"]
        rows = codes.reshape(*codes.shape[:-1], scale.shape[-1], -1) * scale[..., None]
        return rows.reshape(codes.shape).astype(dtype)

    @property
    def _most(self) -> int:
        return 2 ** (self.bits - 1) - 1


@dataclasses.dataclass(frozen=True)
class Unpacked(Symmetric):
    """Symmetric codes of `bits` bits in a byte each, which a file's coder can tell apart (CacheGen).

    Stored are int8 [*b, S, H], whatever `bits` is. `kvjax.save_cache(..., coder="range")` codes them by their
    frequencies in a channel; of packed words it would see parts of several codes.

    >>> Unpacked(3).encode(jnp.array([[1.1, -3.0, 0.4]]))["codes"].tolist()
    [[1, -3, 0]]
    """

    @property
    def says(self) -> str:
        return f"{2**self.bits - 1} whole numbers around 0 in a byte, for a coder to make smaller in files."

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        codes, scale = self.whole(x)
        return {"codes": codes.astype(jnp.int8), "scale": scale}
