"""Rows in a basis that a fit finds for each head: scales of channels, rotations, any matrix."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.grammar.fitted import Fitted, FittedEncoding, ModelSizes, check_sizes
from kvjax.state.code_forms import Span, span_of
from kvjax.state.codes import Codec, CodecArrays, bind
from kvjax.store.levels import without_arrays
from kvjax.store.wrap import WrappedCodec, Wrapper


@dataclasses.dataclass(frozen=True)
class InBasis(Wrapper, FittedEncoding):
    """`InBasis("key", by) >> codec` encodes z = (x - shift) M^-1 of a head's rows x.

    of: the basis of keys or of values. by: the method whose fit finds it. The fitted arrays are "key matrix"
    M and "key inverse" [L, K, H, H], and "key shift" [L, K, H] if rows are shifted, or the same for values.
    Without a shift, attention uses z itself, with queries q M' (`kvjax.state.code_forms.Span`). A matrix
    that is diagonal, or that commutes with RoPE, is the same as one folded into the model's weights. Raises
    ValueError for another `of`.
    """

    of: Literal["key", "value"]
    by: str
    fitted: Fitted | None = None

    def __post_init__(self):
        if self.of not in ("key", "value"):
            raise ValueError(f"a basis is of a 'key' or a 'value', got {self.of!r}")

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        sizes = (model.layers, model.kv_heads, model.head_dim, model.head_dim)
        for name in (f"{self.of} matrix", f"{self.of} inverse"):
            check_sizes(self, "basis", "layers, KV heads, channels, channels", name, sizes)

    def around(self, codec: Codec) -> InBasisCodec:
        return InBasisCodec(self, codec)


@dataclasses.dataclass(frozen=True)
class InBasisCodec(WrappedCodec):
    """Encodes rows in the basis of `word` by `codec`."""

    word: InBasis
    codec: Codec

    def bind(self, arrays: CodecArrays) -> Codec:
        inner, fitted = bind(self.codec, arrays), self.word.fitted
        if fitted is None or fitted.digest not in arrays:
            return dataclasses.replace(self, codec=inner)
        mine, of = arrays[fitted.digest], self.word.of
        return BoundBasis(mine[f"{of} matrix"], mine[f"{of} inverse"], mine.get(f"{of} shift"), inner)

    def span(self, width: int) -> Span:
        """Return the codec that encodes z; `BoundBasis` has the matrix."""
        fitted = self.word.fitted
        if fitted is None or f"{self.word.of} shift" in fitted.arrays:
            return Span(self, np.eye(width))
        return Span(span_of(self.codec, width).codec, np.eye(width))

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        without_arrays(self.word)

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        without_arrays(self.word)


@dataclasses.dataclass(frozen=True, eq=False)
class BoundBasis(WrappedCodec):
    """Encodes (x - shift) M^-1 of rows x [*l, B, K, S, H], for matrices [*l, K, H, H].

    >>> from kvjax.store.affine import Affine
    >>> twice = 2.0 * jnp.eye(2).reshape(1, 2, 2)
    >>> codec = BoundBasis(twice, twice / 4, None, Affine(8))
    >>> data = codec.encode(jnp.array([1.0, 3.0]).reshape(1, 1, 1, 2))
    >>> codec.decode(data, 2, jnp.float32).ravel().round(2).tolist()
    [1.0, 3.0]
    """

    matrix: Float[Array, "*l K H H"]
    inverse: Float[Array, "*l K H H"]
    shift: Float[Array, "*l K H"] | None
    codec: Codec

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        if (x.shape[-3], x.shape[-1]) != (self.matrix.shape[-3], self.matrix.shape[-1]):
            raise ValueError(
                f"a basis was fitted for {self.matrix.shape[-3]} heads of {self.matrix.shape[-1]} channels, "
                f"and these rows have {x.shape[-3]} of {x.shape[-1]}"
            )
        x = x.astype(jnp.float32)
        return self.codec.encode(_by_head(x if self.shift is None else x - self._shift(), self.inverse))

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        x = _by_head(self.codec.decode(data, width, jnp.float32), self.matrix)
        return (x if self.shift is None else x + self._shift()).astype(dtype)

    def _shift(self) -> Float[Array, "*l 1 K 1 H"]:
        assert self.shift is not None
        return self.shift.astype(jnp.float32)[..., None, :, None, :]

    def span(self, width: int) -> Span:
        if self.shift is not None:
            return Span(self, np.eye(width))
        codec, matrix = span_of(self.codec, width)
        matrix = jnp.asarray(matrix, jnp.float32)
        inner = jnp.broadcast_to(matrix, (*self.matrix.shape[:-2], *matrix.shape[-2:]))
        return Span(codec, jnp.matmul(inner, self.matrix, precision=jax.lax.Precision.HIGHEST))


def _by_head(x: Float[Array, "*b S H"], matrix: Float[Array, "*l K H Z"]) -> Float[Array, "*b S Z"]:
    """Multiply x M, head by head."""
    return jnp.einsum("...bksh,...khz->...bksz", x, matrix.astype(x.dtype), precision="highest")
