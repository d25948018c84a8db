"""Stores the few largest numbers of every token unencoded, so that they do not widen the others' range."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.state.codes import Codec
from kvjax.store.wrap import WrappedCodec, Wrapper, joined, part_of


@dataclasses.dataclass(frozen=True)
class Outliers(Wrapper):
    """The largest numbers of every token unencoded: `Outliers(0.01) >> codec` leaves the codec the rest.

    Dense and sparse, as in KVQuant (arXiv:2401.18079, section 3.4). `kvjax.store.extremes` finds them among
    the tokens of a channel, too.

    Args:
        share: of the H channels of a token, in (0, 1]: ceil(share * H) numbers are kept.

    Raises ValueError for other shares.

    >>> from kvjax.words import Affine
    >>> sorted((Outliers(0.25) >> Affine(4)).encode(jnp.ones((1, 8))))
    ['other scale_zero', 'other words', 'outlier channels', 'outlier values']
    """

    share: float

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise ValueError(f"outliers are a share of the channels in (0, 1], got {self.share!r}")

    def count(self, width: int) -> int:
        """How many of `width` channels are kept."""
        # Rounded first, because 0.07 * 100 is slightly above 7 in floating point.
        return min(width, math.ceil(round(self.share * width, 9)))

    def around(self, codec: Codec) -> OutliersCodec:
        return OutliersCodec(self, codec)


@dataclasses.dataclass(frozen=True)
class OutliersCodec(WrappedCodec):
    """Stores the largest numbers of rows beside the codes of the rest: "values" [*b, S, k], "channels".

    `codec` encodes 0 in their place. Values have the dtype of the rows, channels are uint8 up to a width of
    256 and uint16 beyond.
    """

    outliers: Outliers
    codec: Codec

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        width = x.shape[-1]
        _, channels = jax.lax.top_k(jnp.abs(x), self.outliers.count(width))
        values = jnp.take_along_axis(x, channels, -1)
        rest = _put(x, channels, jnp.zeros_like(values))
        small = channels.astype(jnp.uint8 if width <= 256 else jnp.uint16)
        return joined(outlier={"values": values, "channels": small}, other=self.codec.encode(rest))

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        rows, kept = self.codec.decode(part_of(data, "other"), width, dtype), part_of(data, "outlier")
        channels = kept["channels"].astype(jnp.int32)
        return _put(rows, channels, kept["values"].astype(dtype))


def _put(
    rows: Float[Array, "*b H"], channels: Int[Array, "*b k"], values: Float[Array, "*b k"]
) -> Float[Array, "*b H"]:
    """Replace the values of k channels of each of the rows.

    A loop over k masks, because XLA implements a scatter of single numbers on TPUs by copies of gigabytes.
    """
    at = jax.lax.broadcasted_iota(jnp.int32, rows.shape, rows.ndim - 1)
    for i in range(channels.shape[-1]):
        rows = jnp.where(at == channels[..., i : i + 1], values[..., i : i + 1], rows)
    return rows
