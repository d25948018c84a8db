"""Quantised keys and values: affine (min-max) codes, packed, and float8."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt32

from kvjax.base.checks import is_whole
from kvjax.ops.base.bit_packing import (
    halves,
    of_short,
    pack,
    pack_tokens,
    packed_words,
    pair,
    short,
    unpack,
    unpack_tokens,
)
from kvjax.state.code_forms import ROWS, Form
from kvjax.state.codes import Codec


@dataclasses.dataclass(frozen=True)
class Affine(Codec):
    """x ~ code * scale + zero, with zero = min and scale = (max - min) / (2^bits - 1) of a group.

    Codes of 8 bits are uint8 [*b, S, H]. Fewer bits are packed in uint32 words: [*b, S / granule * w, H]
    if granule > 1 tokens are encoded together, [*b, S, w] otherwise. The scale and zero of a group,
    float16 up to 65504 and coarser up to 2^32 (`short`), are the halves of one uint32 (`pair`), stored as

      [*b, S / group, H]                       for axis "channel",
      [*b, S]                                  for axis "token" with one group per token,
      [*b, S, groups]                          with several groups,
      [*b, S / together, groups * together]    if together > 1, with the tokens of a group side by side.

    Codes are computed with the rounded scale and zero, so |error| <= scale / 2, except at the ends of a
    group's range, which float16 rounds, and beyond them. A zero or scale beyond 65504 is rounded outwards, by
    at most 1/64, so that the ends of such a group are within scale / 2, too.

    Args:
        bits: 1, 2, 4 or 8 of a code.
        axis: "token" for groups of channels of one token, or "channel" for groups of tokens of one channel,
            which are encoded together (KIVI's keys, arXiv:2402.02750, section 3).
        group: channels or tokens of a group; None takes all channels.
        together: of axis "token", how many tokens are packed into the same words. Accelerators read those
            faster, but such tokens can only be appended `together` at a time.
        clip: the range of a group is clip * min to clip * max, and numbers are clipped to it (QuaRot,
            arXiv:2404.00456, section 5).

    >>> Affine(4, group=32).granule, Affine(2, "channel", group=32).granule
    (1, 32)
    """

    bits: int
    axis: str = "token"
    group: int | None = None
    together: int = 1
    clip: float = 1.0

    def __post_init__(self):
        if not is_whole(self.bits) or self.bits not in (1, 2, 4, 8):
            raise ValueError(f"bits must be 1, 2, 4 or 8, got {self.bits!r}")
        if self.axis not in ("token", "channel"):
            raise ValueError(f"axis must be 'token' or 'channel', got {self.axis!r}")
        if self.axis == "channel" and not self.group:
            raise ValueError("axis 'channel' needs group=: the number of tokens encoded together, such as 32")
        if self.group is not None and not is_whole(self.group):
            raise ValueError(
                f"group is a number of channels, or of tokens, at least 1, or None, got {self.group!r}"
            )
        if not is_whole(self.together) or (self.axis == "channel" and self.together > 1):
            raise ValueError(
                f"together must be at least 1, and 1 for axis 'channel' (see group), got {self.together}"
            )
        if not 0 < self.clip <= 1:
            raise ValueError(f"clip is a part of a group's range in (0, 1], got {self.clip!r}")

    @property
    def says(self) -> str:
        channels = f"{self.group} channels" if self.group else "all channels"
        group = f"{self.group} tokens of a channel" if self.axis == "channel" else f"{channels} of a token"
        return f"{self.bits} bits a number, with a scale and a zero of 16 bits for {group}."

    @property
    def granule(self) -> int:
        return self.group or 1 if self.axis == "channel" else self.together

    @property
    def steady(self) -> bool:
        # Encoding decoded rows once more would clip their range once more.
        return self.clip == 1

    def form(self, width: int) -> Form | None:
        """How a kernel reads the codes of rows of `width` channels; None if none does."""
        if self.axis == "channel":
            return None if self.bits == 8 else Form("key groups", self.bits, self.granule)
        if self.bits == 8:
            return ROWS if self.together == 1 and self.group in (None, width) else None
        return Form("value groups", self.bits, self.together) if self.together == self.group else None

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        rows, over = self._grouped(x.astype(jnp.float32))
        low, high = rows.min(over, keepdims=True), rows.max(over, keepdims=True)
        if self.clip < 1:
            low, high = self.clip * low, self.clip * high
        zero = _below(low)
        # Beyond float16 the rounded zero may be far below the smallest number: the range starts at it.
        start = jnp.where(jnp.abs(low) < 65520.0, low, of_short(zero))
        scale = short((high - start) / (2**self.bits - 1), outward=True)
        # A constant group has scale 0: every code 0, value zero.
        step = of_short(scale)
        step = jnp.where(step == 0, 1.0, step)
        codes = jnp.clip(jnp.round((rows - of_short(zero)) / step), 0, 2**self.bits - 1)
        kept = self._packed(codes.reshape(x.shape))
        return kept | {"scale_zero": self._numbers(pair(scale, zero))}

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        codes = self._codes(data, width).astype(jnp.float32)
        rows, _ = self._grouped(codes)
        scale, zero = halves(self._spread(data["scale_zero"], rows.ndim))
        return (rows * scale + zero).astype(dtype).reshape(codes.shape)

    def _grouped(self, x: Array) -> tuple[Array, int]:
        """(x with its groups on an axis, that axis): [*b, S, groups, group] or [*b, S / group, group, H]."""
        *batch, s, h = x.shape
        if s % self.granule:
            raise ValueError(f"{s} tokens cannot be encoded {self.granule} at a time")
        if self.axis == "channel":
            return x.reshape(*batch, s // self.granule, self.granule, h), -2
        g = self.group or h
        if h % g:
            raise ValueError(f"group={g} must divide the {h} channels of a head")
        return x.reshape(*batch, s, h // g, g), -1

    def _numbers(self, x: Array) -> Array:
        """Scales and zeros as they are stored, from one pair per group of `_grouped`."""
        if self.axis == "channel":
            return x[..., 0, :]
        *batch, s, groups, _ = x.shape
        if groups == 1 and self.together == 1:
            return x[..., 0, 0]
        if self.together == 1:
            return x[..., 0]
        split = x.reshape(*batch, s // self.together, self.together, groups)
        return jnp.swapaxes(split, -1, -2).reshape(*batch, s // self.together, groups * self.together)

    def _spread(self, x: Array, ndim: int) -> Array:
        """Invert `_numbers`, for groups of `ndim` axes."""
        if self.axis == "channel":
            return x[..., None, :]
        if self.together > 1:
            split = x.reshape(*x.shape[:-1], -1, self.together)
            x = jnp.swapaxes(split, -1, -2).reshape(*x.shape[:-2], -1, split.shape[-2])
        return x.reshape(*x.shape, *(1,) * (ndim - x.ndim))

    def _packed(self, codes: Float[Array, "*b S H"]) -> dict[str, Array]:
        if self.bits == 8:
            return {"codes": codes.astype(jnp.uint8)}
        *batch, s, h = codes.shape
        whole = codes.astype(jnp.uint32)
        if self.granule > 1:
            words = pack_tokens(whole.reshape(*batch, -1, self.granule, h), self.bits)
            return {"words": words.reshape(*batch, -1, h)}
        words = pack(whole.reshape(*batch, s, -1, self.group or h), self.bits)
        return {"words": words.reshape(*batch, s, -1)}

    def _codes(self, data: dict[str, Array], width: int) -> Array:
        """Codes [*b, S, H] of `_packed`."""
        if self.bits == 8:
            return data["codes"]
        words = data["words"]
        *batch, rows, columns = words.shape
        if self.granule > 1:
            per = packed_words(self.granule, self.bits)
            split = words.reshape(*batch, rows // per, per, columns)
            return unpack_tokens(split, self.bits, self.granule).reshape(*batch, -1, columns)
        group = self.group or width
        per = packed_words(group, self.bits)
        split = words.reshape(*batch, rows, columns // per, per)
        return unpack(split, self.bits, group).reshape(*batch, rows, width)


def _below(low: Float[Array, "*b"]) -> UInt32[Array, "*b"]:
    """`low` as short numbers, rounded down beyond float16's range."""
    return jnp.where(low < 0, short(low, outward=True), short(low, outward=False))


@dataclasses.dataclass(frozen=True)
class Float8(Codec):
    """x ~ fp8(x / scale) * scale, with one float16 scale per token that maps its largest value to fp8's.

    Larger numbers than that scale can map, 2.9e7 for e4m3 and 3.7e9 for e5m2, are clipped.

    Args:
        kind: "e4m3" or "e5m2".

    >>> Float8("e5m2").granule
    1
    """

    kind: str = "e4m3"

    granule = 1

    def __post_init__(self):
        if self.kind not in ("e4m3", "e5m2"):
            raise ValueError(f"kind must be 'e4m3' or 'e5m2', got {self.kind!r}")

    @property
    def dtype(self) -> DTypeLike:
        return jnp.float8_e4m3fn if self.kind == "e4m3" else jnp.float8_e5m2

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        x = x.astype(jnp.float32)
        limit = float(jnp.finfo(self.dtype).max)
        most = float(jnp.finfo(jnp.float16).max)
        scale = jnp.minimum(jnp.abs(x).max(-1, keepdims=True) / limit, most).astype(jnp.float16)
        step = jnp.where(scale == 0, jnp.float16(1), scale).astype(jnp.float32)
        codes = jnp.clip(x / step, -limit, limit).astype(self.dtype)
        return {"codes": codes, "scale": scale[..., 0]}

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        x = data["codes"].astype(jnp.float32) * data["scale"].astype(jnp.float32)[..., None]
        return x.astype(dtype)
