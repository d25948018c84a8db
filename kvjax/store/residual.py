"""Two codecs, of which the second encodes the error of the first."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.state.code_forms import Span, span_of
from kvjax.state.codes import Codec
from kvjax.store.wrap import joined, part_of


@dataclasses.dataclass(frozen=True)
class Residual(Codec):
    """x ~ first(x) + rest(x - first(x))."""

    first: Codec
    rest: Codec

    @property
    def granule(self) -> int:
        return math.lcm(self.first.granule, self.rest.granule)

    @property
    def steady(self) -> bool:
        return self.first.steady and self.rest.steady

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        # The first one sees the dtype of the rows, in which it may keep some of their numbers.
        first = self.first.encode(x)
        near = self.first.decode(first, x.shape[-1], jnp.float32)
        rest = self.rest.encode(x.astype(jnp.float32) - near)
        return joined(first=first, rest=rest)

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        first = self.first.decode(part_of(data, "first"), width, jnp.float32)
        return (first + self.rest.decode(part_of(data, "rest"), width, jnp.float32)).astype(dtype)

    def span(self, width: int) -> Span:
        first, rest = span_of(self.first, width), span_of(self.rest, width)
        if first.codec is self.first and rest.codec is self.rest:
            # Neither part is stored in another basis, so decode their sum: half as wide as both side by side.
            return Span(self, np.eye(width))
        codec = ResidualSpan(first.codec, rest.codec, first.matrix.shape[0])
        return Span(codec, np.concatenate([first.matrix, rest.matrix]))


@dataclasses.dataclass(frozen=True)
class FirstPart(Codec):
    """Decodes the first part of what a `Residual` encodes: a cache in fewer bits, in the same memory.

    >>> import jax.numpy as jnp
    >>> from kvjax.words import Affine
    >>> both = Residual(Affine(2), Affine(4))
    >>> x = jnp.asarray([[0.0, 0.4, 3.0]])
    >>> codes = FirstPart(both).encode(x)
    >>> [[round(float(y), 1) for y in c.decode(codes, 3, jnp.float32)[0]] for c in (FirstPart(both), both)]
    [[0.0, 0.0, 3.0], [0.0, 0.4, 3.0]]
    """

    of: Residual

    @property
    def granule(self) -> int:
        return self.of.granule

    @property
    def steady(self) -> bool:
        return self.of.steady

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        return self.of.encode(x)

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        return self.of.first.decode(part_of(data, "first"), width, dtype)


@dataclasses.dataclass(frozen=True)
class ResidualSpan(Codec):
    """The first `cut` channels by one codec and the others by another."""

    first: Codec
    rest: Codec
    cut: int

    @property
    def granule(self) -> int:
        return math.lcm(self.first.granule, self.rest.granule)

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        return joined(first=self.first.encode(x[..., : self.cut]), rest=self.rest.encode(x[..., self.cut :]))

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        first = self.first.decode(part_of(data, "first"), self.cut, dtype)
        rest = self.rest.decode(part_of(data, "rest"), width - self.cut, dtype)
        return jnp.concatenate([first, rest], -1)
