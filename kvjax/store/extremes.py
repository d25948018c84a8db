"""Stores the largest and smallest numbers of every token or channel unencoded, and codes of the others."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.base.checks import is_whole
from kvjax.ops.base.largest import first_largest
from kvjax.state.codes import Codec
from kvjax.state.write import put_in_rows
from kvjax.store.wrap import WrappedCodec, Wrapper, joined, part_of


@dataclasses.dataclass(frozen=True)
class Extremes(Wrapper):
    """`Extremes(0.02) >> codec` stores the largest and smallest numbers outside the codec (GEAR's filter).

    axis "token": of the channels of every token. axis "channel": of every channel, among `group` tokens that
    are encoded together. Of n numbers, ceil(share / 2 * n) are kept at each end, at least one and at most
    half of them (arXiv:2403.05527, section 3, Filter_s). Raises ValueError for other shares or axes.

    >>> import jax.numpy as jnp
    >>> from kvjax.store.affine import Affine
    >>> codec = Extremes(0.5) >> Affine(8)
    >>> data = codec.encode(jnp.array([[100.0, 1.0, 2.0, -50.0]]))
    >>> codec.decode(data, 4, jnp.float32).round(2).tolist()
    [[100.0, 1.0, 2.0, -50.0]]
    """

    share: float
    axis: str = "token"
    group: int | None = None

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise ValueError(f"extremes are a share of the numbers in (0, 1], got {self.share!r}")
        if self.axis not in ("token", "channel"):
            raise ValueError(f"axis must be 'token' or 'channel', got {self.axis!r}")
        tokens = self.axis == "channel"
        if not (is_whole(self.group) if tokens else self.group is None):
            raise ValueError(
                "group= is the number of tokens among which a channel's extremes are found: give it for axis "
                f"'channel', such as 64, and leave it out for axis 'token', got {self.group!r}"
            )

    def count(self, n: int) -> int:
        """How many of n numbers are kept at each end."""
        # Rounded first, because 0.07 * 100 is slightly above 7 in floating point.
        return max(1, min(n // 2, math.ceil(round(self.share / 2 * n, 9))))

    def around(self, codec: Codec) -> ExtremesCodec:
        return ExtremesCodec(self, codec)


@dataclasses.dataclass(frozen=True)
class ExtremesCodec(WrappedCodec):
    """Stores the extremes of rows beside the codes of the rest: "values", and "at", their indices.

    Both are [*b, S, 2 k] for axis "token", and [*b, S / group * 2 k, H] for axis "channel". `codec` encodes
    the mean of the other numbers in their place, so that they widen no range. Values have the dtype of the
    rows; "at" is uint8 up to 256 numbers and uint16 beyond.
    """

    extremes: Extremes
    codec: Codec

    @property
    def granule(self) -> int:
        return math.lcm(self.extremes.group or 1, self.codec.granule)

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        lines = self._lines(x)
        n = lines.shape[-1]
        k = self.extremes.count(n)
        at, others = _ends(jax.lax.stop_gradient(lines), k)
        values = jnp.take_along_axis(lines, at, -1)
        # A single number is both ends, so no others are left for a mean.
        total = jnp.where(others, lines, 0).sum(-1, keepdims=True, dtype=jnp.float32)
        mean = (total / max(n - 2 * k, 1)).astype(x.dtype)
        rest = self._rows(jnp.where(others, lines, mean), x.shape)
        small = at.astype(jnp.uint8 if n <= 256 else jnp.uint16)
        kept = {"values": self._stored(values), "at": self._stored(small)}
        return joined(extreme=kept, other=self.codec.encode(rest))

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        rows = self.codec.decode(part_of(data, "other"), width, dtype)
        lines, kept = self._lines(rows), part_of(data, "extreme")
        at = self._found(kept["at"], lines).astype(jnp.int32)
        values = self._found(kept["values"], lines).astype(dtype)
        return self._rows(put_in_rows(lines, at, values), rows.shape)

    def _lines(self, x: Array) -> Array:
        """Arrange rows as lines with extremes of their own: [*b, S, H], or [*b, S / group, H, group]."""
        group = self.extremes.group
        if group is None:
            return x
        *batch, s, h = x.shape
        if s % group:
            raise ValueError(f"{s} tokens cannot be encoded {group} at a time")
        return jnp.swapaxes(x.reshape(*batch, s // group, group, h), -1, -2)

    def _rows(self, lines: Array, shape: tuple[int, ...]) -> Array:
        """Arrange lines as rows of this shape: the inverse of `_lines`."""
        return lines if self.extremes.group is None else jnp.swapaxes(lines, -1, -2).reshape(shape)

    def _stored(self, x: Shaped[Array, "..."]) -> Array:
        """Arrange a few numbers per line, with the token axis where the cache expects it."""
        if self.extremes.group is None:
            return x
        return jnp.swapaxes(x, -1, -2).reshape(*x.shape[:-3], -1, x.shape[-2])

    def _found(self, x: Array, lines: Array) -> Array:
        """Arrange what was stored by the lines it belongs to: the inverse of `_stored`."""
        if self.extremes.group is None:
            return x
        *batch, groups, h, _ = lines.shape
        return jnp.swapaxes(x.reshape(*batch, groups, -1, h), -1, -2)


def _ends(lines: Float[Array, "*b n"], count: int) -> tuple[Int[Array, "*b m"], Bool[Array, "*b n"]]:
    """Find the indices of every line's `count` largest numbers, then of the smallest; a mask of the others.

    Extremes are so few that finding them one after the other is faster than sorting all numbers.
    """
    place = jax.lax.broadcasted_iota(jnp.int32, lines.shape, lines.ndim - 1)

    def take(others: Bool[Array, "*b n"], sign: Array) -> tuple[Bool[Array, "*b n"], Int[Array, "*b"]]:
        at, _ = first_largest(jnp.where(others, lines * sign, -jnp.inf), -1)
        return others & (place != at[..., None]), at

    signs = jnp.repeat(jnp.array([1, -1], lines.dtype), count)
    others, at = jax.lax.scan(take, jnp.ones(lines.shape, bool), signs)
    return jnp.moveaxis(at, 0, -1), others
