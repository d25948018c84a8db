"""Sub-byte integers in uint32 words, so that the bytes a codec claims are the bytes it holds."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, UInt32


def packed_words(count: int, bits: int) -> int:
    """Words that `count` integers of `bits` bits take."""
    return -(-count // (32 // bits))


def pack(codes: UInt32[Array, "*b n"], bits: int) -> UInt32[Array, "*b w"]:
    """Little-endian packing along the last axis; the tail of the last word is 0.

    >>> import jax.numpy as jnp
    >>> pack(jnp.array([1, 2, 3], jnp.uint32), 8)
    Array([197121], dtype=uint32)
    """
    per = 32 // bits
    n = codes.shape[-1]
    words = packed_words(n, bits)
    padded = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, words * per - n)])
    parts = padded.reshape(*codes.shape[:-1], words, per) << _shifts(bits, codes.ndim)
    return parts.sum(-1, dtype=jnp.uint32)


def _shifts(bits: int, before: int) -> Array:
    shifts = jnp.arange(32 // bits, dtype=jnp.uint32) * jnp.uint32(bits)
    return shifts.reshape((1,) * before + (-1,))


def unpack(words: UInt32[Array, "*b w"], bits: int, count: int) -> UInt32[Array, "*b n"]:
    """The first `count` integers of `pack`."""
    per = 32 // bits
    parts = (words[..., None] >> _shifts(bits, words.ndim)) & jnp.uint32(2**bits - 1)
    return parts.reshape(*words.shape[:-1], words.shape[-1] * per)[..., :count]
