"""Codes that differ from layer to layer."""

from __future__ import annotations

import dataclasses
import math

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.state.codes import Codec


@dataclasses.dataclass(frozen=True)
class FirstLayers(Codec):
    """Encodes the first `layers` layers by `codec`, those above by `rest`; outside a layer, by `codec`.

    Without `rest`, which a store's own codec may lack, layers above are stored as computed.

    Raises ValueError for a negative number of layers.

    >>> from kvjax.store.affine import Affine
    >>> FirstLayers(1, Affine(4), Affine(1)).at(1)
    Affine(bits=1, axis='token', group=None, together=1, clip=1.0)
    """

    layers: int
    codec: Codec
    rest: Codec | None

    def __post_init__(self):
        if isinstance(self.layers, bool) or not isinstance(self.layers, int) or self.layers < 0:
            raise ValueError(f"the number of first layers is at least 0, got {self.layers!r}")

    @property
    def each(self) -> tuple[Codec, ...]:
        """The codecs that it chooses from."""
        return (self.codec,) if self.rest is None else (self.codec, self.rest)

    @property
    def granule(self) -> int:
        return math.lcm(*(codec.granule for codec in self.each))

    @property
    def steady(self) -> bool:
        return all(codec.steady for codec in self.each)

    def at(self, layer: int) -> Codec | None:
        """Return the codec of a layer, if it has one; layers count from 0."""
        return self.codec if layer < self.layers else self.rest

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        return self.codec.encode(x)

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        return self.codec.decode(data, width, dtype)
