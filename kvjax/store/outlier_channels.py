"""Codes of the channels that are largest over a run of tokens, apart from codes of the other channels."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from kvjax.base.checks import is_whole
from kvjax.state.codes import Codec, CodecArrays, bind
from kvjax.store.wrap import joined, part_of


@dataclasses.dataclass(frozen=True)
class OutlierChannels(Codec):
    """x = outliers + others: the `count` largest channels of `group` tokens by a codec of their own.

    A channel's size is its norm over the `group` tokens, of one head; "channels" [*b, S / group, count] says
    which are the largest. Both codecs encode whole rows, with zeros in the channels of the other, and neither
    contributes to the other's channels when rows are decoded. This is QJL's treatment of outliers
    (arXiv:2406.03482, section 4.1).

    Args:
        count: how many channels of a head are outliers, at most half of them.
        group: how many tokens have the same outliers.
        outliers: the codec of these channels.
        others: the codec of all other channels.

    Raises ValueError for a count or group below 1, and for tokens that are no multiple of `group`.

    >>> from kvjax.words import Affine
    >>> codec = OutlierChannels(1, 2, Affine(8), Affine(8))
    >>> data = codec.encode(jnp.asarray([[1.0, 50.0, 2.0], [1.0, -60.0, 2.0]]))
    >>> data["channels"].tolist()
    [[1]]
    """

    count: int
    group: int
    outliers: Codec
    others: Codec

    def __post_init__(self):
        for name in ("count", "group"):
            if not is_whole(getattr(self, name)):
                raise ValueError(f"{name} is a whole number of at least 1, got {getattr(self, name)!r}")

    @property
    def granule(self) -> int:
        return math.lcm(self.group, self.outliers.granule, self.others.granule)

    @property
    def steady(self) -> bool:
        # Encoded again, other channels may be the largest.
        return False

    def bind(self, arrays: CodecArrays) -> Codec:
        bound = {name: bind(getattr(self, name), arrays) for name in ("outliers", "others")}
        return dataclasses.replace(self, **bound)

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        *batch, tokens, width = x.shape
        if tokens % self.group:
            raise ValueError(f"{tokens} tokens cannot be encoded {self.group} at a time")
        runs = x.astype(jnp.float32).reshape(*batch, tokens // self.group, self.group, width)
        size = jax.lax.stop_gradient(jnp.square(runs).sum(-2))
        _, channels = jax.lax.top_k(size, min(self.count, width // 2))
        channels = channels.astype(jnp.uint8 if width <= 256 else jnp.uint16)
        large = self._large(channels, width)
        return {
            "channels": channels,
            **joined(
                outlier=self.outliers.encode(jnp.where(large, x, 0)),
                other=self.others.encode(jnp.where(large, 0, x)),
            ),
        }

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        large = self._large(data["channels"], width)
        return jnp.where(
            large,
            self.outliers.decode(part_of(data, "outlier"), width, dtype),
            self.others.decode(part_of(data, "other"), width, dtype),
        )

    def _large(self, channels: Array, width: int) -> Bool[Array, "*b S H"]:
        """Which channels of every token are outliers, from their indices per run of tokens."""
        place = jax.lax.broadcasted_iota(channels.dtype, (*channels.shape, width), channels.ndim)
        large = (channels[..., None] == place).any(-2)
        return jnp.repeat(large, self.group, axis=-2)
