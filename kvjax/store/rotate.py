"""Rotations of the channels of a head before they are encoded, which spread single large channels over all.

Their matrices are made on the host from a seed, in float64, so they are the same on every device.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.base.checks import is_whole
from kvjax.state.code_forms import Span, span_of, times
from kvjax.state.codes import Codec
from kvjax.store.wrap import WrappedCodec, Wrapper

# Streams of random numbers from one seed, so that two matrices of the same seed are independent.
ORTHOGONAL, SIGNS, SKETCH = range(3)


def draw(seed: int, what: int) -> np.random.RandomState:
    """Random numbers that belong to a seed and a use; numpy promises that these never change."""
    return np.random.RandomState([seed, what])


def constant(x: np.ndarray) -> np.ndarray:
    """Make x read-only, because all callers share it."""
    x.flags.writeable = False
    return x


@lru_cache(maxsize=64)
def orthogonal(width: int, seed: int) -> Float[np.ndarray, "H H"]:
    """Draw a uniformly random orthogonal matrix: Q of a Gaussian matrix's QR with a positive diagonal of R.

    >>> q = orthogonal(3, seed=0)
    >>> bool(np.allclose(q @ q.T, np.eye(3)))
    True
    """
    q, r = np.linalg.qr(draw(seed, ORTHOGONAL).standard_normal((width, width)))
    return constant(q * np.where(np.diag(r) < 0, -1.0, 1.0))


@lru_cache(maxsize=64)
def hadamard(width: int, seed: int) -> Float[np.ndarray, "H H"]:
    """(H (x) Q) D: the Hadamard matrix of the largest power of two in `width`, and random signs D.

    Q is `orthogonal` of the remaining odd factor, and 1 for a power of two. Then all entries are +-1 /
    sqrt(width), so that one large channel is spread evenly over all channels.

    >>> (hadamard(2, seed=0) ** 2).round(3).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    power = width & -width
    matrix = np.ones((1, 1))
    while matrix.shape[0] < power:
        matrix = np.kron(matrix, np.array([[1.0, 1.0], [1.0, -1.0]]))
    signs = draw(seed, SIGNS).choice([-1.0, 1.0], width)
    return constant(np.kron(matrix / np.sqrt(power), orthogonal(width // power, seed)) * signs)


@dataclasses.dataclass(frozen=True)
class Rotate(Wrapper):
    """A rotation of a head's channels: `Rotate() >> codec` encodes R x. "hadamard" or "orthogonal".

    Args:
        kind: "hadamard", for head dimensions that are powers of 2, or "orthogonal", a random matrix.
        seed: of the random matrix or the signs.
        block: how many neighbouring channels are rotated together, each block by the same matrix; None: all.

    Raises ValueError for another kind, a block below 1, and if the block does not divide the channels.

    >>> from kvjax.words import Affine
    >>> (Rotate() >> Affine(2)).codec
    Affine(bits=2, axis='token', group=None, together=1, clip=1.0)
    """

    kind: Literal["hadamard", "orthogonal"] = "hadamard"
    seed: int = 0
    block: int | None = None

    def __post_init__(self):
        if self.block is not None and not is_whole(self.block):
            raise ValueError(f"a block is a number of channels, at least 1, or None, got {self.block!r}")
        if self.kind not in ("hadamard", "orthogonal"):
            raise ValueError(f"a rotation is of kind 'hadamard' or 'orthogonal', got {self.kind!r}")

    def matrix(self, width: int) -> Float[np.ndarray, "H H"]:
        """R, with R R' = 1."""
        made, block = hadamard if self.kind == "hadamard" else orthogonal, self.block or width
        if width % block:
            raise ValueError(f"block={block} must divide the {width} channels of a head")
        return (
            np.kron(np.eye(width // block), made(block, self.seed))
            if block < width
            else made(width, self.seed)
        )

    def around(self, codec: Codec) -> Rotated:
        return Rotated(self, codec)


@dataclasses.dataclass(frozen=True)
class Rotated(WrappedCodec):
    """Encodes R x by `codec`. Rows are decoded to R' y, or attention uses y in its own basis (`span`)."""

    rotation: Rotate
    codec: Codec

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        return self.codec.encode(times(x.astype(jnp.float32), self.rotation.matrix(x.shape[-1]).T))

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        turned = self.codec.decode(data, width, jnp.float32)
        return times(turned, self.rotation.matrix(width)).astype(dtype)

    def span(self, width: int) -> Span:
        codec, matrix = span_of(self.codec, width)
        return Span(codec, matrix @ self.rotation.matrix(width))
