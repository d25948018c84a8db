"""Approximates tokens together by a low-rank matrix; with `Residual`, the error of another codec."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.base.checks import is_whole
from kvjax.state.codes import Codec
from kvjax.store.rotate import orthogonal

# A is stored times this, B divided by it; a power of two rounds nothing.
_SHARE = 64.0


@dataclasses.dataclass(frozen=True)
class LowRank(Codec):
    """x ~ A B' of rank `rank`, for every `tokens` tokens of a head.

    `turns` steps of power iteration from a fixed start find A = orth(x B), B = x' A (arXiv:2403.05527,
    section 3, SVDSolver); more steps come closer to the optimal matrix of that rank. Stored in float16: 64 A
    as "tokens" [*b, S, r], B / 64 as "channels" [*b, S / tokens * r, H], with r = min(rank, tokens, H):
    columns of A have length 1, those of B may be long. Raises ValueError if a number is below 1.

    `Residual(Affine(2), LowRank(2, tokens=64))` adds a rank-2 approximation of the error of 2-bit codes.

    >>> import jax.numpy as jnp
    >>> x = jnp.outer(jnp.arange(4.0), jnp.array([1.0, -2.0]))
    >>> codec = LowRank(1, tokens=4)
    >>> data = codec.encode(x)
    >>> {name: a.shape for name, a in data.items()}
    {'tokens': (4, 1), 'channels': (1, 2)}
    >>> float(abs(codec.decode(data, 2, jnp.float32) - x).max()) < 0.01
    True
    """

    rank: int
    tokens: int
    turns: int = 3

    # Rows decoded by this codec alone have that rank and are encoded exactly. But with another codec before
    # this one, encoding the decoded sum again adds an error each time.
    steady = False

    def __post_init__(self):
        for name in ("rank", "tokens", "turns"):
            if not is_whole(getattr(self, name)):
                raise ValueError(f"{name} of LowRank must be at least 1, got {getattr(self, name)!r}")

    @property
    def granule(self) -> int:
        return self.tokens

    def columns(self, width: int) -> int:
        """Choose the rank for rows of `width` channels: no matrix has more than it has rows or columns."""
        return min(self.rank, self.tokens, width)

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        *batch, s, h = x.shape
        if s % self.tokens:
            raise ValueError(f"{s} tokens cannot be encoded {self.tokens} at a time")
        blocks = x.astype(jnp.float32).reshape(*batch, s // self.tokens, self.tokens, h)
        r = self.columns(h)
        channels = jnp.broadcast_to(
            jnp.asarray(orthogonal(h, 0)[:, :r], jnp.float32), (*blocks.shape[:-2], h, r)
        )
        for _ in range(self.turns):
            tokens = _orthonormal(_product(blocks, channels))
            channels = _product(jnp.swapaxes(blocks, -1, -2), tokens)
        turned = jnp.swapaxes(channels, -1, -2)
        # The product is unchanged, and float16 holds entries of B up to 4e6.
        return {
            "tokens": jnp.multiply(tokens, _SHARE).astype(jnp.float16).reshape(*batch, s, r),
            "channels": (turned / _SHARE).astype(jnp.float16).reshape(*batch, -1, h),
        }

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        *batch, s, r = data["tokens"].shape
        tokens = data["tokens"].reshape(*batch, s // self.tokens, self.tokens, r)
        channels = data["channels"].reshape(*batch, s // self.tokens, r, width)
        return _product(tokens, channels).astype(dtype).reshape(*batch, s, width)


def _product(a: Float[Array, "*b I J"], b: Float[Array, "*b J K"]) -> Float[Array, "*b I K"]:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _orthonormal(x: Float[Array, "*b T R"]) -> Float[Array, "*b T R"]:
    """Compute an orthonormal basis of the columns of x; 0 in place of a dependent column.

    Gram-Schmidt, with two passes over each column because one pass leaves rounding errors of nearly dependent
    columns. There are few columns, and unlike a QR's, its gradient is finite for a rank-deficient x.
    """
    done: list[Array] = []
    for j in range(x.shape[-1]):
        column = x[..., j]
        before = jnp.square(column).sum(-1, keepdims=True)
        for _ in range(2):
            for other in done:
                column = column - (other * column).sum(-1, keepdims=True) * other
        square = jnp.square(column).sum(-1, keepdims=True)
        # Below this, the rest of a dependent column is rounding error: 1e-6 of its length.
        left = square > 1e-12 * before
        length = jnp.sqrt(jnp.where(left, square, 1.0))
        done.append(jnp.where(left, column / length, 0.0))
    return jnp.stack(done, -1)
