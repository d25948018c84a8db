"""Codes of a vector's length and direction: optimal scalar codes of a random direction, signs of a sketch.

The parts of TurboQuant (arXiv:2504.19874) and of QJL (arXiv:2406.03482). Neither has a scale or a zero per
group: besides its codes, a row needs only one length.
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float16

from kvjax.base.checks import is_whole
from kvjax.ops.base.bit_packing import pack, unpack
from kvjax.state.code_forms import Span, times
from kvjax.state.codes import Codec
from kvjax.store.codebooks import sphere_codebook
from kvjax.store.rotate import SKETCH, constant, draw

# A length beyond float16's range is stored divided by this, with a minus sign.
_FAR = 2.0**16


def _length(x: Float[Array, "*b S H"]) -> Float16[Array, "*b S"]:
    """||x||, as `stored_length` stores it."""
    square = jnp.square(x.astype(jnp.float32)).sum(-1)
    # The root's gradient at 0 is no number.
    return stored_length(jnp.where(square == 0, 0.0, jnp.sqrt(jnp.where(square == 0, 1.0, square))))


def stored_length(length: Float[Array, "*b"]) -> Float16[Array, "*b"]:
    """Store a number of at least 0 in float16, divided by -2^16 if it exceeds float16; NaN beyond 4e9."""
    large = ~(length <= float(jnp.finfo(jnp.float16).max))
    far = jnp.where(length < _FAR * 65504, -length / _FAR, jnp.nan)
    return jnp.where(large, far, length).astype(jnp.float16)


def length_of(stored: Float16[Array, "*b"]) -> Float[Array, "*b"]:
    """Return the number that `stored_length` stores, in float32.

    >>> length_of(stored_length(jnp.asarray([2.0, 2.0**20]))).tolist()
    [2.0, 1048576.0]
    """
    wide = stored.astype(jnp.float32)
    return jnp.where(wide < 0, -_FAR * wide, wide)


def _long(x: Float[Array, "*b S H"], length: Float16[Array, "*b S"], dtype: DTypeLike) -> Array:
    return (x * length_of(length)[..., None]).astype(dtype)


@dataclasses.dataclass(frozen=True)
class LloydMax(Codec):
    """x ~ ||x|| c[codes]: coordinates of x / ||x|| by the best codebook of `bits` bits for random directions.

    One codebook serves all rows of a width (`sphere_codebook`), and suits rows after a random rotation:
    `Rotate("orthogonal") >> LloydMax(4)` is TurboQuant_mse (arXiv:2504.19874, algorithm 1). Stored are words
    [*b, S, w] and the float16 length [*b, S]; codes are of x over the rounded length.
    """

    bits: int

    granule = 1
    steady = False

    def __post_init__(self):
        if not is_whole(self.bits, 1, 4):
            raise ValueError(f"bits must be 1, 2, 3 or 4, got {self.bits!r}")

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        bounds = sphere_codebook(x.shape[-1], self.bits).bounds
        length = _length(x)
        by = length_of(jnp.where(length == 0, jnp.float16(1), length))
        direction = x.astype(jnp.float32) / by[..., None]
        codes = jnp.zeros(x.shape, jnp.uint32)
        for bound in bounds:
            codes = codes + (direction > float(bound)).astype(jnp.uint32)
        return {"words": pack(codes, self.bits), "length": length}

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        centroids = jnp.asarray(sphere_codebook(width, self.bits).centroids, jnp.float32)
        return _long(centroids[unpack(data["words"], self.bits, width)], data["length"], dtype)


def _bits(x: Bool[Array, "*b S H"]) -> Array:
    return pack(x.astype(jnp.uint32), 1)


@dataclasses.dataclass(frozen=True)
class Signs(Codec):
    """x ~ rms(x) sign(x), in one bit per channel and a float16 per row; 0 has the sign of 1."""

    granule = 1

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        return {"signs": _bits(x >= 0), "size": _length(x / math.sqrt(x.shape[-1]))}

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        signs = 2.0 * unpack(data["signs"], 1, width).astype(jnp.float32) - 1.0
        return _long(signs, data["size"], dtype)


@lru_cache(maxsize=64)
def gaussian(width: int, seed: int, signs: int = 1, orthogonal: bool = False) -> Float[np.ndarray, "m H"]:
    """Draw a matrix of independent N(0, 1) numbers, of `signs` rows for every column.

    orthogonal: of every `width` rows an orthonormal basis of their span, times sqrt(width).

    >>> s = gaussian(4, seed=0, signs=2, orthogonal=True)
    >>> bool(np.allclose(s.T @ s, 8 * np.eye(4)))
    True
    """
    drawn = draw(seed, SKETCH).standard_normal((signs * width, width))
    if orthogonal:
        q, r = np.linalg.qr(drawn.reshape(signs, width, width).swapaxes(-1, -2))
        # With a positive diagonal of R, which makes Q uniformly random.
        q = q * np.where(np.diagonal(r, 0, -2, -1) < 0, -1.0, 1.0)[:, None]
        drawn = math.sqrt(width) * q.swapaxes(-1, -2).reshape(drawn.shape)
    return constant(drawn)


@dataclasses.dataclass(frozen=True)
class SignSketch(Codec):
    """x ~ ||x|| sqrt(pi / 2) / m S' sign(S x) with a Gaussian S: <q, x> is unbiased over S.

    QJL (arXiv:2406.03482, definition 3.1) with m = `signs` rows of S for every channel. It estimates inner
    products; a single decoded row has an error larger than its own norm. orthogonal: rows of S are orthogonal
    to each other, `width` rows at a time, which lowers the variance. Raises ValueError if signs < 1.
    """

    seed: int = 0
    signs: int = 1
    orthogonal: bool = False

    granule = 1
    steady = False

    def __post_init__(self):
        if isinstance(self.signs, bool) or not isinstance(self.signs, int) or self.signs < 1:
            raise ValueError(f"a sketch has at least one sign for every channel, got {self.signs!r}")

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        sketch = times(x.astype(jnp.float32), self._matrix(x.shape[-1]).T)
        return {"signs": _bits(sketch >= 0), "size": _length(x)}

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        codec, matrix = self.span(width)
        return times(codec.decode(data, len(matrix), jnp.float32), matrix).astype(dtype)

    def span(self, width: int) -> Span:
        rows = self.signs * width
        return Span(Signs(), math.sqrt(math.pi / 2) / rows * self._matrix(width))

    def _matrix(self, width: int) -> Float[np.ndarray, "m H"]:
        return gaussian(width, self.seed, self.signs, self.orthogonal)
