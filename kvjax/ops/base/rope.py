"""Rotary position embedding (RoFormer, arXiv:2104.09864) in the rotate-half layout of Hugging Face.

A rotation is a function of a position and of static frequencies; the caller decides which position a slot is
rotated by (its own, or its rank among the live slots).
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.base.ranges import Range, check_fields
from kvjax.ops.base.dtypes import wide


@dataclasses.dataclass(frozen=True)
class Rope:
    """Frequencies of one rotary embedding; `kind` is Hugging Face's `rope_type`.

    default: f_i = theta^(-2i/H). linear: f / factor. llama3, yarn: blends of f and f / factor by wavelength
    (Llama 3.1; YaRN, arXiv:2309.00071, section 3.2 and eq. 22). dynamic: theta grows with the row's length
    beyond `original_max` (NTK-aware scaling), so it is the one kind whose frequencies depend on data.
    proportional: f / factor, and zero for the slowest, so that `rotary_dim` channels rotate by the
    frequencies that they have in a whole head, in pairs (i, i + H/2) (Gemma 4). none: no rotation (NoPE).
    rotary_dim: how many channels are rotated, all unless given; start: the first of them. copies: how many
    heads the channels hold, each with the same frequencies; the first halves of all heads come before all
    second halves. Only layers set it, so it is not part of a config's name.

    Difference from the YaRN paper, as in its authors' code and every library: between the frequencies that
    are kept and those that are divided, the blend is linear in the index i, not in the number of rotations.
    """

    KINDS: ClassVar[tuple[str, ...]] = (
        "default",
        "linear",
        "dynamic",
        "llama3",
        "yarn",
        "proportional",
        "none",
    )
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    rotary_dim: int | None = None
    start: int = 0
    copies: int = dataclasses.field(default=1, repr=False)

    def __post_init__(self):
        check_fields(self, "rope.", whole=Range(0))
        if self.kind not in self.KINDS:
            raise ValueError(f"rope kind must be one of {', '.join(self.KINDS)}, got {self.kind!r}")
        if not (self.theta > 0 and self.factor > 0):
            raise ValueError(f"rope needs theta and factor above 0, got {self.theta} and {self.factor}")
        if self.kind == "proportional" and (self.start or self.copies > 1):
            raise ValueError("a proportional rope turns pairs over a whole head: leave start and copies out")
        if self.rotary_dim is not None and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ValueError(
                f"rotary_dim must be even and >= 2: channels turn in pairs; got {self.rotary_dim}"
            )

    @property
    def by_length(self) -> bool:
        """Whether frequencies depend on how many tokens a row has."""
        return self.kind == "dynamic"

    def turning(self, head_dim: int) -> int:
        """How many of a head's channels lie in rotated pairs, some of them rotated by zero."""
        if self.kind == "proportional":
            return head_dim
        return 0 if self.kind == "none" else self.rotary_dim or head_dim - self.start

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Compute static angular frequencies [H/2], float64; of a short row if they depend on its length."""
        dim = self.turning(head_dim)
        if self.copies > 1:
            one = dataclasses.replace(self, rotary_dim=dim // self.copies, copies=1)
            return np.tile(one.frequencies(head_dim), self.copies)
        base = self.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / max(dim, 1))
        if self.kind == "linear":
            return base / self.factor
        if self.kind == "proportional":
            turn = np.arange(dim // 2) < (self.rotary_dim or dim) // 2
            return np.where(turn, base / self.factor, 0.0)
        if self.kind == "llama3":
            wavelength = 2 * np.pi / base
            low, high = self.low_freq_factor, self.high_freq_factor
            smooth = np.clip((self.original_max / wavelength - low) / (high - low), 0, 1)
            return base / self.factor * (1 - smooth) + base * smooth
        if self.kind == "yarn":
            keep = 1 - _yarn_ramp(self, dim)
            return base / self.factor * (1 - keep) + base * keep
        return base

    def frequencies_at(
        self, head_dim: int, length: Int[Array, "*s"], dtype: DTypeLike
    ) -> Float[Array, "*s h"]:
        """Angular frequencies of rows with `length` tokens, if they depend on it."""
        dim = self.turning(head_dim)
        reach = jnp.maximum(length, self.original_max).astype(dtype)
        stretch = self.factor * reach / self.original_max - (self.factor - 1)
        theta = self.theta * stretch ** (dim / (dim - 2))
        return theta[..., None] ** last_axis(-np.arange(0, dim, 2) / dim, length.ndim, dtype)

    @property
    def amplitude(self) -> float:
        """Factor on cos and sin; 1 except for YaRN's attention temperature."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _yarn_mscale(self.factor, self.mscale) / _yarn_mscale(self.factor, self.mscale_all_dim)
        return _yarn_mscale(self.factor, 1.0)


def partners(width: int, rope: Rope | None) -> np.ndarray:
    """Find the other channel of each channel's RoPE pair; the channel itself if it is not rotated."""
    found = np.arange(width)
    if rope is not None:
        half = rope.turning(width) // 2
        a, b = (slice(rope.start + i * half, rope.start + (i + 1) * half) for i in (0, 1))
        found[a], found[b] = np.arange(width)[b], np.arange(width)[a]
    return found


def _yarn_mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_ramp(rope: Rope, dim: int) -> np.ndarray:
    """0 for frequencies with many rotations within the original context (kept), 1 for those with few."""

    def turns_at(rotations: float) -> float:
        return dim * math.log(rope.original_max / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = turns_at(rope.beta_fast), turns_at(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)


def last_axis(x: np.ndarray, before: int, dtype: DTypeLike) -> Array:
    """Make a vector the last axis of an array with as many axes before it."""
    return jnp.asarray(x, dtype).reshape((1,) * before + (-1,))


def angles(
    rope: Rope,
    pos: Int[Array, "*s"],
    head_dim: int,
    length: Int[Array, "*#s"] | None = None,
    *,
    dtype: DTypeLike = np.float32,
) -> tuple[Float[Array, "*s h"], Float[Array, "*s h"]]:
    """Return (cos, sin) of every position, computed in `dtype`.

    length: tokens of the row so far, if frequencies depend on it (`Rope.by_length`).
    """
    if rope.by_length and length is not None:
        freq = rope.frequencies_at(head_dim, length, dtype)
    else:
        freq = last_axis(rope.frequencies(head_dim), pos.ndim, dtype)
    angle = pos[..., None].astype(dtype) * freq
    return jnp.cos(angle) * rope.amplitude, jnp.sin(angle) * rope.amplitude


def rotate(
    x: Float[Array, "*s H"], cos: Float[Array, "*#s h"], sin: Float[Array, "*#s h"], start: int = 0
) -> Float[Array, "*s H"]:
    """Rotate x by angles: pairs (i, i + h) of the 2h channels from `start`; the others are unchanged."""
    half = cos.shape[-1]
    a, b = x[..., start : start + half], x[..., start + half : start + 2 * half]
    a, b, cos, sin = (y.astype(wide(x)) for y in (a, b, cos, sin))
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
    if 2 * half == x.shape[-1]:
        return turned
    return jnp.concatenate([x[..., :start], turned, x[..., start + 2 * half :]], -1)
