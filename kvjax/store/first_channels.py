"""Rows cut after their first channels: latents whose channels come in the order of their importance (ZDC)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.state.codes import Codec


@dataclasses.dataclass(frozen=True)
class FirstChannels(Codec):
    """The first `share` of a row's channels, at least one, in the row's own type; the others are 0.

    Of latents of a singular value decomposition, this is the best approximation of lower rank. Stored is
    "first" [*b, S, R]. Raises ValueError for a share outside (0, 1].

    >>> codec = FirstChannels(0.5)
    >>> codec.decode(codec.encode(jnp.array([[3.0, 2.0, 1.0, 0.5]])), 4, jnp.float32).tolist()
    [[3.0, 2.0, 0.0, 0.0]]
    """

    share: float

    granule = 1

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be a share of the channels in (0, 1], got {self.share!r}")

    @property
    def says(self) -> str:
        return f"The first {self.share:g} of the channels, as they are."

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        return {"first": x[..., : max(1, round(self.share * x.shape[-1]))]}

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        first = data["first"]
        left = [(0, 0)] * (first.ndim - 1) + [(0, width - first.shape[-1])]
        return jnp.pad(first, left).astype(dtype)
