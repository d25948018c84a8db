"""Vector quantisation with one codebook for normal numbers, and the normalisation it needs (NSNQuant)."""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from kvjax.state.codes import Codec
from kvjax.store.coupled import piecewise
from kvjax.store.rotate import SKETCH, constant, draw
from kvjax.store.sphere import length_of, stored_length
from kvjax.store.wrap import WrappedCodec, Wrapper, joined, part_of

_SAMPLES, _TURNS, _ENTRIES = 20_000, 25, 256


@lru_cache(maxsize=8)
def gaussian_codebook(channels: int, seed: int) -> Float[np.ndarray, "256 c"]:
    """256 vectors that quantise `channels` independent N(0, 1) numbers: k-means of random draws, by Lloyd.

    >>> gaussian_codebook(1, 0).shape
    (256, 1)
    """
    from scipy.cluster.vq import kmeans2  # takes longer to import than all methods

    drawn = draw(seed, SKETCH).standard_normal((_SAMPLES, channels))
    centres, _ = kmeans2(drawn, drawn[:_ENTRIES].copy(), _TURNS, minit="matrix", missing="raise")
    return constant(centres)


@dataclasses.dataclass(frozen=True)
class GaussianVectors(Codec):
    """Encodes every `channels` channels of a normal row by the nearest of 256 vectors, in 8 bits.

    One codebook serves all rows (`gaussian_codebook`); rows should have mean 0 and variance 1, as after
    `Normalised(...) >> Rotate()`. Stored are "codes" uint8 [*b, S, H / channels]. Raises ValueError if
    `channels` is below 1 or does not divide rows.
    """

    channels: int
    seed: int = 0

    granule = 1
    steady = False

    def __post_init__(self):
        if isinstance(self.channels, bool) or not isinstance(self.channels, int) or self.channels < 1:
            raise ValueError(f"a vector is a whole number of channels, at least 1, got {self.channels!r}")

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        if x.shape[-1] % self.channels:
            raise ValueError(f"channels={self.channels} must divide the {x.shape[-1]} channels of a head")
        book = jnp.asarray(gaussian_codebook(self.channels, self.seed), jnp.float32)
        half = (jnp.square(book).sum(-1) / 2).reshape((1,) * x.ndim + (-1,))

        def nearest(rows: Float[Array, "*b S H"]) -> UInt8[Array, "*b S C"]:
            vectors = rows.astype(jnp.float32).reshape(*rows.shape[:-1], -1, self.channels)
            near = jnp.einsum("...c,ec->...e", vectors, book, precision="highest") - half
            return near.argmax(-1).astype(jnp.uint8)

        return {"codes": piecewise(nearest, x)}

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        book = jnp.asarray(gaussian_codebook(self.channels, self.seed), jnp.float32)
        return book[data["codes"].astype(jnp.int32)].reshape(*data["codes"].shape[:-1], width).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Normalised(Wrapper):
    """`Normalised(64) >> codec` brings tokens to length sqrt(H), their mean to 0, and to that length again.

    y = (x / a - m) / b, with a and b the roots of each token's mean square before and after, and m the mean
    of `tokens` tokens of a head in every channel (arXiv:2505.18231, section 4). Stored are "scales" float16
    [*b, S, 2], a and a b (`stored_length`), and "means" float16 [*b, S / tokens, H]. Raises ValueError for no
    tokens.
    """

    tokens: int

    def __post_init__(self):
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 1:
            raise ValueError(f"a mean is of a whole number of tokens >= 1, got {self.tokens!r}")

    def around(self, codec: Codec) -> NormalisedCodec:
        return NormalisedCodec(self, codec)


@dataclasses.dataclass(frozen=True)
class NormalisedCodec(WrappedCodec):
    """Encodes normalised tokens by `codec`, and stores their scales and means."""

    normalised: Normalised
    codec: Codec

    @property
    def granule(self) -> int:
        return math.lcm(self.normalised.tokens, self.codec.granule)

    @property
    def steady(self) -> bool:
        return False

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        tokens = self.normalised.tokens
        if x.shape[-2] % tokens:
            raise ValueError(f"{x.shape[-2]} tokens cannot be encoded {tokens} at a time")
        rows = x.astype(jnp.float32)
        a = _size(rows)
        y = rows / _or_one(a)
        means = y.reshape(*x.shape[:-2], -1, tokens, x.shape[-1]).mean(-2).astype(jnp.float16)
        y = y - jnp.repeat(means.astype(jnp.float32), tokens, -2)
        b = _size(y)
        kept = {"scales": stored_length(jnp.concatenate([a, a * b], -1)), "means": means}
        return joined(normal=kept, rest=self.codec.encode(y / _or_one(b)))

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        kept = part_of(data, "normal")
        scales, means = length_of(kept["scales"]), kept["means"].astype(jnp.float32)
        rows = self.codec.decode(part_of(data, "rest"), width, jnp.float32) * scales[..., 1:]
        means = jnp.repeat(means, self.normalised.tokens, -2, total_repeat_length=rows.shape[-2])
        return (rows + scales[..., :1] * means).astype(dtype)


def _size(x: Float[Array, "*b H"]) -> Float[Array, "*b 1"]:
    """Compute the root of the mean square, whose gradient at 0 is 0."""
    square = jnp.square(x).mean(-1, keepdims=True)
    return jnp.where(square == 0, 0.0, jnp.sqrt(jnp.where(square == 0, 1.0, square)))


def _or_one(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    return jnp.where(x == 0, 1.0, x)
