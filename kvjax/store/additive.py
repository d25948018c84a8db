"""Sums of vectors of codebooks that commute with RoPE (CommVQ)."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.base.checks import is_whole
from kvjax.base.errors import InputError
from kvjax.grammar.fitted import Fitted, FittedEncoding, ModelSizes, check_sizes
from kvjax.ops.base.bit_packing import pack, unpack
from kvjax.state.codes import Codec, CodecArrays
from kvjax.store.coupled import piecewise
from kvjax.store.levels import without_arrays


@dataclasses.dataclass(frozen=True)
class CommutingSums(Codec, FittedEncoding):
    """A row as a sum over stages r of c_r[a_r] + J c_r[b_r] (CommVQ, arXiv:2506.18879, section 4).

    J turns the pairs of channels (j, j + H/2) by a right angle, (x, y) -> (-y, x): columns a and b of 2x2
    blocks [[x, -y], [y, x]], which commute with rotations of these pairs. RoPE rotates the same pairs, so a
    rotated row is the same sum of rotated vectors. Stages are chosen one after the other, the nearest pair
    (a, b) of all for what earlier stages leave.

    of: of keys or of values, the fitted array "key codebooks" or "value codebooks" [L, K, R, 2^bits, H], with
    R = H / channels stages, rounded down, at least one. A number takes 2 bits / channels bits and nothing
    else. Stored are words [*b, S, w] of 2 R codes. Raises ValueError for bits outside 1 to 8, channels below
    1 and another `of`.
    """

    channels: int
    bits: int
    of: Literal["key", "value"]
    fitted: Fitted | None = None

    granule = 1
    by = "commvq"
    # Stages chosen for a decoded row may be others.
    steady = False

    def __post_init__(self):
        if not is_whole(self.bits, 1, 8):
            raise ValueError(f"a vector's code has 1 to 8 bits, got {self.bits!r}")
        if not is_whole(self.channels):
            raise ValueError(f"a stage is for a whole number of channels, at least 1, got {self.channels!r}")
        if self.of not in ("key", "value"):
            raise ValueError(f"codebooks are of a 'key' or a 'value', got {self.of!r}")

    @property
    def name(self) -> str:
        """The name of the fitted array."""
        return f"{self.of} codebooks"

    @property
    def says(self) -> str:
        return f"A pair of vectors of fitted codebooks, {2 * self.bits} bits, for {self.channels} channels."

    def stages(self, width: int) -> int:
        """How many pairs of vectors a row of `width` channels is the sum of."""
        return max(1, width // self.channels)

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes, or are other codebooks."""
        assert self.fitted is not None
        check_sizes(self, "codebooks", "layers, KV heads", self.name, (model.layers, model.kv_heads))
        stages, entries, channels = self.fitted.arrays[self.name].shape[2:]
        asked = self.stages(model.head_dim), 2**self.bits
        if channels != model.head_dim:
            raise InputError(
                f"it was fitted to heads of {channels} channels, this model's have {model.head_dim}: run "
                f"`kvjax fit {self.by}` on this model"
            )
        if (stages, entries) != asked:
            raise InputError(
                f"it was fitted with {stages} stages of {entries} vectors, and channels={self.channels}, "
                f"bits={self.bits} ask for {asked[0]} of {asked[1]}: run `kvjax fit {self.by} --set "
                f"channels={self.channels},bits={self.bits}`"
            )

    def bind(self, arrays: CodecArrays) -> Codec:
        if self.fitted is None or self.fitted.digest not in arrays:
            return self
        return NearestSums(self.bits, arrays[self.fitted.digest][self.name])

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        without_arrays(self)

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        without_arrays(self)


@dataclasses.dataclass(frozen=True, eq=False)
class NearestSums(Codec):
    """The nearest sums of the vectors [*l, K, R, C, H] of a head, for rows [*l, B, K, S, H].

    >>> codec = NearestSums(1, jnp.array([[[[0.0, 0.0], [1.0, 2.0]]]]))
    >>> data = codec.encode(jnp.array([-0.8, 3.1]).reshape(1, 1, 1, 2))
    >>> codec.decode(data, 2, jnp.float32).ravel().tolist()
    [-1.0, 3.0]
    """

    bits: int
    vectors: Float[Array, "*l K R C H"]

    granule = 1

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        *_, heads, stages, entries, channels = self.vectors.shape
        if (x.shape[-3], x.shape[-1]) != (heads, channels):
            raise ValueError(
                f"codebooks were fitted for {heads} heads of {channels} channels, and these rows have "
                f"{x.shape[-3]} heads of {x.shape[-1]}"
            )
        books = [self._stage(r) for r in range(stages)]

        def chosen(rows: Float[Array, "*b S H"]) -> Float[Array, "*b S R2"]:
            left, codes = rows.astype(jnp.float32), []
            for r, book in enumerate(books):
                # |x - a - b|^2 / 2 without |x|^2, which is the same for all pairs.
                first, second = (self._met(left, y) - jnp.square(y).sum(-1) / 2 for y in book)
                both = jnp.einsum("...eh,...fh->...ef", *book, precision="highest")
                found = (first[..., None] + second[..., None, :] - both).reshape(*first.shape[:-1], -1)
                best = found.argmax(-1).astype(jnp.int32)
                pair = best // entries, best % entries
                left = left - self._sum(r, *pair)
                codes += pair
            # Whole numbers below 256 are exact.
            return jnp.stack(codes, -1).astype(jnp.float32)

        return {"words": pack(piecewise(chosen, x).astype(jnp.uint32), self.bits)}

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        stages = self.vectors.shape[-3]
        codes = unpack(data["words"], self.bits, 2 * stages).astype(jnp.int32)
        parts = [self._sum(r, codes[..., 2 * r], codes[..., 2 * r + 1]) for r in range(stages)]
        return sum(parts[1:], parts[0]).astype(dtype)

    def _stage(self, r: int) -> tuple[Array, Array]:
        """Return the vectors c and J c of a stage, [*l, 1, K, 1, C, H]."""
        c = self.vectors[..., r, :, :].astype(jnp.float32)[..., None, :, None, :, :]
        return c, right_angle(c)

    @staticmethod
    def _met(x: Float[Array, "*b S H"], vectors: Array) -> Float[Array, "*b S C"]:
        return jnp.einsum("...h,...eh->...e", x, vectors, precision="highest")

    def _sum(self, r: int, a: Array, b: Array) -> Float[Array, "*b S H"]:
        """c[a] + J c[b] of stage r, for indices [*l, B, K, S]."""
        book = self.vectors[..., r, :, :].astype(jnp.float32)
        *lead, entries, channels = book.shape
        first = np.arange(math.prod(lead), dtype=np.int32).reshape(lead) * entries
        first = jnp.asarray(first)[..., None, :, None]
        flat = book.reshape(-1, channels)
        return flat[first + a] + right_angle(flat[first + b])


def right_angle(x: Float[Array, "*b H"]) -> Float[Array, "*b H"]:
    """Turn the pairs of channels (j, j + H/2) by a right angle: (x, y) -> (-y, x).

    >>> right_angle(jnp.array([1.0, 2.0])).tolist()
    [-2.0, 1.0]
    """
    half = x.shape[-1] // 2
    return jnp.concatenate([-x[..., half:], x[..., :half]], -1)
