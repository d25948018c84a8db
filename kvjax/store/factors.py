"""Keys and values as products of a tall factor, in codes, and a small one, as it is (DecoQuant)."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.base.checks import is_whole
from kvjax.state.codes import Codec
from kvjax.store.wrap import WrappedCodec, Wrapper, joined, part_of


@dataclasses.dataclass(frozen=True)
class Factors(Wrapper):
    """`Factors(1024) >> codec` encodes A of x = A B, for every `tokens` tokens of a head.

    With the singular values x = U S V', A = U S^(1/2) has as many rows as there are tokens, and B = S^(1/2)
    V' is H x H (arXiv:2405.12591, section 3). The outliers of x are in B, in float16: 16 H / tokens more bits
    per number. Stored are the arrays of `codec` and "small" [*b, S / granule * H, H]. Raises ValueError for
    tokens below 1.

    >>> from kvjax.store.affine import Affine
    >>> codec = Factors(4) >> Affine(8)
    >>> x = jnp.outer(jnp.arange(1.0, 5), jnp.array([1.0, -100.0]))
    >>> float(abs(codec.decode(codec.encode(x), 2, jnp.float32) / x - 1).max()) < 0.01
    True
    """

    tokens: int

    def __post_init__(self):
        if not is_whole(self.tokens):
            raise ValueError(f"tokens are factored together, at least 1, got {self.tokens!r}")

    def around(self, codec: Codec) -> FactoredCodec:
        return FactoredCodec(self, codec)


@dataclasses.dataclass(frozen=True)
class FactoredCodec(WrappedCodec):
    """Encodes by `codec` the tall factors of rows."""

    word: Factors
    codec: Codec

    @property
    def steady(self) -> bool:
        """False: the factors of decoded rows are others."""
        return False

    @property
    def granule(self) -> int:
        return math.lcm(self.word.tokens, self.codec.granule)

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        *batch, s, h = x.shape
        if s % self.granule:
            raise ValueError(f"{s} tokens cannot be encoded {self.granule} at a time")
        blocks = x.astype(jnp.float32).reshape(*batch, -1, self.granule, h)
        gram = jnp.einsum("...th,...tj->...hj", blocks, blocks, precision="highest")
        squares, v = jnp.linalg.eigh(gram)
        largest = jnp.take_along_axis(v, jnp.abs(v).argmax(-2, keepdims=True), -2)
        v = v * jnp.where(largest < 0, -1.0, 1.0)
        root = jnp.sqrt(jnp.sqrt(jnp.maximum(squares, 0.0)))[..., None, :]
        tall = _product(blocks, v) / jnp.where(root == 0, 1.0, root)
        small = jnp.swapaxes(v * root, -1, -2).astype(jnp.float16).reshape(*batch, -1, h)
        return joined(tall=self.codec.encode(tall.reshape(x.shape))) | {"small": small}

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        tall = self.codec.decode(part_of(data, "tall"), width, jnp.float32)
        blocks = tall.reshape(*tall.shape[:-2], -1, self.granule, width)
        small = data["small"].astype(jnp.float32).reshape(*blocks.shape[:-2], width, width)
        return _product(blocks, small).reshape(tall.shape).astype(dtype)


def _product(a: Float[Array, "*b I J"], b: Float[Array, "*b J K"]) -> Float[Array, "*b I K"]:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
