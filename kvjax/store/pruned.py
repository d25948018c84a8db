"""Rows of which only the largest numbers are stored, with a bit mask of their channels."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt32

from kvjax.ops.base.bit_packing import pack, unpack
from kvjax.ops.base.largest import largest
from kvjax.state.code_forms import is_steady
from kvjax.state.codes import Codec, Thinning
from kvjax.store.wrap import Wrapper, joined, part_of


@dataclasses.dataclass(frozen=True)
class Pruned(Wrapper, Thinning):
    """Keeps the floor(share * H) largest of a token's H numbers, at least one; the others become 0.

    Unstructured pruning by magnitude, token by token (Mustafar, arXiv:2505.22913). Stored are "values" [*b,
    S, m] in the order of their channels, in the dtype of the rows, and "words" [*b, S, w] of one bit per
    channel. Of equal numbers the first is kept. codec: encodes the values, rows of m numbers, in turn, as in
    `Pruned(0.5) >> Affine(2)`. Raises ValueError for a share outside (0, 1].

    >>> import jax.numpy as jnp
    >>> codec = Pruned(0.5)
    >>> codec.decode(codec.encode(jnp.array([[1.0, -4.0, 3.0, 2.0]])), 4, jnp.float32).tolist()
    [[0.0, -4.0, 3.0, 0.0]]
    """

    share: float
    codec: Codec | None = None

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise ValueError(f"what stays is a share of the channels in (0, 1], got {self.share!r}")

    def around(self, codec: Codec) -> Codec:
        inner = codec if self.codec is None else self.codec.around(codec)  # type: ignore[attr-defined]
        return dataclasses.replace(self, codec=inner)

    @property
    def granule(self) -> int:
        return 1 if self.codec is None else self.codec.granule

    @property
    def steady(self) -> bool:
        return is_steady(self.codec)

    def count(self, width: int) -> int:
        """How many of `width` numbers are kept."""
        # Rounded first, because 0.29 * 100 is slightly below 29 in floating point.
        return max(1, int(round(self.share * width, 9)))

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        count = self.count(x.shape[-1])
        words = pack(largest(x, count).astype(jnp.uint32), 1)
        channels = _places(_stored(words, x.shape[-1]), count)
        values = jnp.take_along_axis(x, channels, -1)
        if self.codec is None:
            return {"values": values, "words": words}
        return {"words": words, **joined(values=self.codec.encode(values))}

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        bits = unpack(data["words"], 1, width)
        # Slots that hold nothing have no bits at all.
        place = jnp.maximum(_stored(data["words"], width) - 1, 0)
        if self.codec is None:
            values = data["values"]
        else:
            values = self.codec.decode(part_of(data, "values"), self.count(width), dtype)
        rows = jnp.take_along_axis(values, place, -1)
        return jnp.where(bits == 1, rows, 0).astype(dtype)


def _stored(words: UInt32[Array, "*b w"], width: int) -> Int[Array, "*b H"]:
    """For each channel, how many of the channels up to and including it are stored."""
    whole = jax.lax.population_count(words).astype(jnp.int32)
    before = jnp.cumsum(whole, -1) - whole
    up_to = (jnp.uint32(2) << jnp.arange(32, dtype=jnp.uint32)) - jnp.uint32(1)
    up_to = up_to.reshape((1,) * words.ndim + (-1,))
    inside = jax.lax.population_count(words[..., None] & up_to).astype(jnp.int32)
    return (before[..., None] + inside).reshape(*words.shape[:-1], -1)[..., :width]


@partial(jnp.vectorize, signature="(h)->(m)", excluded=(1,))
def _places(stored: Int[Array, "H"], count: int) -> Int[Array, "m"]:
    """Find the channels of the first, second, ... number that is stored."""
    return jnp.searchsorted(stored, jnp.arange(1, count + 1), method="scan_unrolled")
