"""Keys stored before rotation, which a decode kernel rotates as it reads them."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.ops.base.rope import Rope, angles, rotate
from kvjax.pallas_kernels.rotation import RotatedChannels
from kvjax.pallas_kernels.streaming import LANES, SUBLANES


class KeyRotation(NamedTuple):
    """A rotation, and an integer for every slot of a layer; queries are given rotated."""

    rope: Rope
    phase: Int[Array, "B K S"]


def angle_steps(rope: Rope, h: int) -> np.ndarray:
    """Compute the angle of each pair of channels per position, in units of 2^-32 of a full turn, [half].

    >>> angle_steps(Rope(rotary_dim=4), 8).tolist()
    [683565276, 6835653]
    """
    return np.round(rope.frequencies(h) / (2 * np.pi) * 2**32).astype(np.int64).astype(np.int32)


def rotated_channels(rope: Rope, h: int) -> RotatedChannels | None:
    """Which of h channels a kernel rotates; None if none."""
    half = rope.turning(h) // 2
    return RotatedChannels(rope.start, half, rope.amplitude) if half else None


def refusal(rope: Rope) -> str:
    """Why no kernel rotates keys in this way; empty if one can."""
    return f"{rope.kind} rope's frequencies depend on a row's length" if rope.by_length else ""


def no_tiles(rope: Rope | None, h: int) -> str:
    """Why a TPU's kernel cannot rotate h channels, which must fill tiles; empty if it can."""
    which = None if rope is None else rotated_channels(rope, h)
    if which is None or not (which.start % SUBLANES or which.half % SUBLANES):
        return ""
    return f"{2 * which.half} channels from {which.start} are rotated, expected multiples of {SUBLANES}"


def in_kernel(rotation: KeyRotation | None, h: int) -> tuple[RotatedChannels | None, tuple[Array, ...]]:
    """Which of h channels a TPU's kernel rotates, and its operands for that, [half, 128]."""
    which = None if rotation is None else rotated_channels(rotation.rope, h)
    if rotation is None or which is None:
        return None, ()
    return which, (jnp.asarray(np.repeat(angle_steps(rotation.rope, h)[:, None], LANES, 1)),)


def rotated_keys(
    rotation: KeyRotation, k: Float[Array, "B K S H"], dtype: jnp.dtype
) -> Float[Array, "B K S H"]:
    """Keys rotated by their phases, in `dtype`."""
    waves = angles(rotation.rope, rotation.phase, k.shape[-1], dtype=dtype)
    return rotate(k.astype(dtype), *waves, rotation.rope.start)
