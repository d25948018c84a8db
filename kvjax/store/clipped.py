"""Clips rows to a quantile of their magnitudes before encoding (OSCAR)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.state.code_forms import Form, Span, span_of
from kvjax.state.codes import Codec
from kvjax.store.wrap import WrappedCodec, Wrapper


@dataclasses.dataclass(frozen=True)
class Clipped(Wrapper):
    """`Clipped(0.96) >> codec` encodes min(max(x, -t), t), with t a quantile of |x| of each row.

    Of H numbers in rising order, t is number floor(share * H), counted from 0 (arXiv:2605.17757, section 3);
    with a share of 1, rows stay as they are. Raises ValueError for a share outside (0, 1].

    >>> from kvjax.store.affine import Affine
    >>> codec = Clipped(0.5) >> Affine(8)
    >>> codec.decode(codec.encode(jnp.array([[9.0, -1.0, 2.0, 1.0]])), 4, jnp.float32).round(1).tolist()
    [[2.0, -1.0, 2.0, 1.0]]
    """

    share: float

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise ValueError(f"rows are cut at a share of their numbers in (0, 1], got {self.share!r}")

    def around(self, codec: Codec) -> ClippedCodec:
        return ClippedCodec(self, codec)


@dataclasses.dataclass(frozen=True)
class ClippedCodec(WrappedCodec):
    """Encodes clipped rows by `codec`, without extra arrays."""

    word: Clipped
    codec: Codec

    def form(self, width: int) -> Form | None:
        return self.codec.form(width)

    def span(self, width: int) -> Span:
        codec, matrix = span_of(self.codec, width)
        return Span(self if codec is self.codec else codec, matrix)

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        # Rounded first, because 0.29 * 100 is slightly below 29 in floating point.
        at = int(round(self.word.share * x.shape[-1], 9))
        if at >= x.shape[-1]:
            return self.codec.encode(x)
        most = jnp.sort(jnp.abs(x), -1)[..., at : at + 1]
        return self.codec.encode(jnp.clip(x, -most, most))

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        return self.codec.decode(data, width, dtype)
