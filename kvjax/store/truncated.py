"""Rows of many tokens as few coordinates of each, in a basis of their own."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.base.checks import is_whole
from kvjax.ops.base.solve import one_by_one
from kvjax.state.codes import Codec


@dataclasses.dataclass(frozen=True)
class Truncated(Codec):
    """x ~ U S V' of the `rank` largest singular values, for every `tokens` tokens of a head.

    Stored in the dtype of x are "coordinates" U S [*b, S, r] and "basis" V' [*b, S / tokens * r, H], with r =
    min(rank, tokens, H). Raises ValueError for a number below 1.

    >>> x = jnp.outer(jnp.arange(4.0), jnp.array([1.0, -2.0]))
    >>> codec = Truncated(1, tokens=4)
    >>> {name: a.shape for name, a in codec.encode(x).items()}
    {'coordinates': (4, 1), 'basis': (1, 2)}
    >>> bool(jnp.allclose(codec.decode(codec.encode(x), 2, jnp.float32), x, atol=1e-5))
    True
    """

    rank: int
    tokens: int

    # Rows of other tokens that are decoded and encoded together lose something again.
    steady = False

    def __post_init__(self):
        for name in ("rank", "tokens"):
            if not is_whole(getattr(self, name)):
                raise ValueError(f"{name} of Truncated must be at least 1, got {getattr(self, name)!r}")

    @property
    def granule(self) -> int:
        return self.tokens

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        *batch, s, h = x.shape
        if s % self.tokens:
            raise ValueError(f"{s} tokens cannot be encoded {self.tokens} at a time")
        blocks = x.astype(jnp.float32).reshape(*batch, s // self.tokens, self.tokens, h)
        # The gradient of eigenvectors need not be finite, so that of a projection on a given basis is taken.
        fixed = jax.lax.stop_gradient(blocks)
        gram = jnp.einsum("...th,...tj->...hj", fixed, fixed, precision="highest")
        # Eigenvalues are in ascending order.
        vectors = one_by_one(lambda a: jnp.linalg.eigh(a)[1], gram)[..., ::-1]
        basis = vectors[..., : min(self.rank, self.tokens, h)]
        found = jnp.einsum("...th,...hr->...tr", blocks, basis, precision="highest")
        return {
            "coordinates": found.reshape(*batch, s, -1).astype(x.dtype),
            "basis": jnp.swapaxes(basis, -1, -2).reshape(*batch, -1, h).astype(x.dtype),
        }

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        *batch, s, r = data["coordinates"].shape
        tall = data["coordinates"].reshape(*batch, s // self.tokens, self.tokens, r).astype(jnp.float32)
        basis = data["basis"].reshape(*batch, s // self.tokens, r, width).astype(jnp.float32)
        found = jnp.einsum("...tr,...rh->...th", tall, basis, precision="highest")
        return found.astype(dtype).reshape(*batch, s, width)
