"""Affine (min-max) quantisation of keys and values, packed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.store.packing import pack, unpack


@dataclasses.dataclass(frozen=True)
class Affine:
    """x ~ code * scale + zero, with zero = min and scale = (max - min) / (2^bits - 1) of a group.

    axis "token": groups of `group` channels of one token (None: all of them). axis "channel": groups of
    `group` tokens of one channel, which are encoded together (KIVI's keys, arXiv:2402.02750, section 3).
    Codes are packed in uint32 words; scale and zero are float16, and codes are computed from the rounded
    ones, so |error| <= scale / 2 up to float16 rounding of the range's ends.
    """

    bits: int
    axis: str = "token"
    group: int | None = None

    def __post_init__(self):
        if self.bits not in (1, 2, 4, 8):
            raise ValueError(f"bits must be 1, 2, 4 or 8, got {self.bits}")
        if self.axis not in ("token", "channel"):
            raise ValueError(f"axis must be 'token' or 'channel', got {self.axis!r}")
        if self.axis == "channel" and not self.group:
            raise ValueError("axis 'channel' needs group=: the number of tokens encoded together, such as 32")

    @property
    def granule(self) -> int:
        return self.group or 1 if self.axis == "channel" else 1

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        rows = self._grouped(x.astype(jnp.float32))
        low, high = rows.min(-1, keepdims=True), rows.max(-1, keepdims=True)
        zero = low.astype(jnp.float16)
        scale = ((high - low) / (2**self.bits - 1)).astype(jnp.float16)
        # A constant group has scale 0: every code 0, value zero.
        step = jnp.where(scale == 0, jnp.float16(1), scale).astype(jnp.float32)
        codes = jnp.clip(jnp.round((rows - zero.astype(jnp.float32)) / step), 0, 2**self.bits - 1)
        words = pack(codes.astype(jnp.uint32), self.bits)
        return {"words": words, "scale": scale[..., 0], "zero": zero[..., 0]}

    def decode(self, data: dict[str, Array], width: int, dtype: Any) -> Float[Array, "*b S H"]:
        group = self._group(width)
        codes = unpack(data["words"], self.bits, group).astype(jnp.float32)
        scale, zero = (data[n].astype(jnp.float32)[..., None] for n in ("scale", "zero"))
        rows = (codes * scale + zero).astype(dtype)
        if self.axis == "token":
            return rows.reshape(*rows.shape[:-2], width)
        tokens = jnp.swapaxes(rows, -1, -2)
        return tokens.reshape(*rows.shape[:-3], rows.shape[-3] * group, width)

    def _group(self, width: int) -> int:
        return self.granule if self.axis == "channel" else (self.group or width)

    def _grouped(self, x: Array) -> Array:
        """token: [*b, S, groups, group]; channel: [*b, S / group, H, group]."""
        *batch, s, h = x.shape
        if self.axis == "token":
            g = self._group(h)
            if h % g:
                raise ValueError(f"group={g} must divide the {h} channels of a head")
            return x.reshape(*batch, s, h // g, g)
        if s % self.granule:
            raise ValueError(f"{s} tokens cannot be encoded {self.granule} at a time")
        return jnp.swapaxes(x.reshape(*batch, s // self.granule, self.granule, h), -1, -2)


@dataclasses.dataclass(frozen=True)
class Float8:
    """x ~ fp8(x / scale) * scale, one float16 scale per token: its largest value fills the range."""

    kind: str = "e4m3"

    granule = 1

    def __post_init__(self):
        if self.kind not in ("e4m3", "e5m2"):
            raise ValueError(f"kind must be 'e4m3' or 'e5m2', got {self.kind!r}")

    @property
    def dtype(self) -> Any:
        return jnp.float8_e4m3fn if self.kind == "e4m3" else jnp.float8_e5m2

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        x = x.astype(jnp.float32)
        limit = float(jnp.finfo(self.dtype).max)
        scale = (jnp.abs(x).max(-1, keepdims=True) / limit).astype(jnp.float16)
        step = jnp.where(scale == 0, jnp.float16(1), scale).astype(jnp.float32)
        codes = jnp.clip(x / step, -limit, limit).astype(self.dtype)
        return {"codes": codes, "scale": scale[..., 0]}

    def decode(self, data: dict[str, Array], width: int, dtype: Any) -> Float[Array, "*b S H"]:
        x = data["codes"].astype(jnp.float32) * data["scale"].astype(jnp.float32)[..., None]
        return x.astype(dtype)
