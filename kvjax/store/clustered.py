"""Codes of groups of alike channels, of unequal sizes, which a fit finds in each head (SKVQ)."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.base.checks import is_whole
from kvjax.base.errors import InputError
from kvjax.grammar.fitted import Fitted, FittedEncoding, ModelSizes, check_sizes
from kvjax.ops.base.bit_packing import pack, unpack
from kvjax.state.codes import Codec, CodecArrays
from kvjax.store.levels import without_arrays

# The largest number and the smallest step of a group, as the authors' code has them.
LARGEST, LEAST = float(jnp.finfo(jnp.float8_e4m3fn).max), 1e-5


@dataclasses.dataclass(frozen=True)
class Clustered(Codec, FittedEncoding):
    """Affine codes of a token's channels by the range of their group (arXiv:2405.06219, section 3).

    of: the groups of keys or of values, the fitted array "key group" or "value group" [L, K, H], a number of
    a group for each channel: H / `group` groups, of `group` channels on average. The code of x is the nearest
    whole number to (x - zero) / scale, with zero = clip min and scale = clip (max - min) / (2^bits - 1) of
    the group. Stored are words [*b, S, w] of H codes, and "scale" and "zero" [*b, S, H / group] in float8
    (e4m3), 16 / group bits per number. Raises ValueError for bits outside 1 to 8, a group below 1 and a clip
    outside (0, 1].
    """

    bits: int
    of: Literal["key", "value"]
    group: int = 32
    clip: float = 1.0
    fitted: Fitted | None = None

    granule = 1
    by = "skvq"

    def __post_init__(self):
        if not is_whole(self.bits, 1, 8):
            raise ValueError(f"bits are 1 to 8, got {self.bits!r}")
        if self.of not in ("key", "value"):
            raise ValueError(f"groups are of a 'key' or a 'value', got {self.of!r}")
        if not is_whole(self.group):
            raise ValueError(f"a group has a number of channels, at least 1, on average, got {self.group!r}")
        if not 0 < self.clip <= 1:
            raise ValueError(f"clip is a part of a group's range in (0, 1], got {self.clip!r}")

    @property
    def name(self) -> str:
        """The name of the fitted array."""
        return f"{self.of} group"

    @property
    def steady(self) -> bool:
        # Encoding decoded rows once more would clip their range once more.
        return self.clip == 1

    @property
    def says(self) -> str:
        return f"{self.bits} bits a number, with a scale and a zero of 8 bits for {self.group} channels."

    def groups(self, width: int) -> int:
        """Compute the number of groups of a head of `width` channels.

        >>> Clustered(2, "key", group=32).groups(128)
        4
        """
        if width % self.group:
            raise InputError(f"group={self.group} must divide the {width} channels of a head")
        return width // self.group

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted groups are for another model or another `group`."""
        assert self.fitted is not None
        sizes = (model.layers, model.kv_heads, model.head_dim)
        check_sizes(self, "groups", "layers, KV heads, channels", self.name, sizes)
        count, found = self.groups(model.head_dim), self.fitted.arrays[self.name]
        sizes_of = (found[..., None] == np.arange(count)).sum(-2)
        if (sizes_of == 0).any() or (sizes_of.sum(-1) != model.head_dim).any():
            raise InputError(
                f"it was fitted with {len(np.unique(found))} groups of a head, and group={self.group} asks "
                f"for {count}: run `kvjax fit {self.by} --set group={self.group}`"
            )

    def bind(self, arrays: CodecArrays) -> Codec:
        if self.fitted is None or self.fitted.digest not in arrays:
            return self
        return GroupedChannels(self, arrays[self.fitted.digest][self.name])

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        without_arrays(self)

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        without_arrays(self)


@dataclasses.dataclass(frozen=True, eq=False)
class GroupedChannels(Codec):
    """`Clustered` bound to the groups [*l, K, H] of its layers, for rows [*l, B, K, S, H].

    >>> codec = GroupedChannels(Clustered(1, "key", group=2), jnp.array([[0, 1, 1, 1]]))
    >>> data = codec.encode(jnp.array([9.0, 1.0, 0.0, 0.0]).reshape(1, 1, 1, 4))
    >>> codec.decode(data, 4, jnp.float32).ravel().tolist()
    [9.0, 1.0, 0.0, 0.0]
    """

    word: Clustered
    group: Int[Array, "*l K H"]

    granule = 1

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        if (x.shape[-3], x.shape[-1]) != self.group.shape[-2:]:
            raise ValueError(
                f"groups were fitted for (heads, channels) {self.group.shape[-2:]}, and these rows have "
                f"{(x.shape[-3], x.shape[-1])}"
            )
        rows, most = x.astype(jnp.float32), 2**self.word.bits - 1
        lows = [jnp.where(mine, rows, jnp.inf).min(-1) for mine in self._masks()]
        highs = [jnp.where(mine, rows, -jnp.inf).max(-1) for mine in self._masks()]
        low, high = (self.word.clip * jnp.stack(ends, -1) for ends in (lows, highs))
        scale = jnp.maximum((high - low) / most, LEAST)
        codes = jnp.round(jnp.clip((rows - self._each(low)) / self._each(scale), 0, most))
        kept = {n: jnp.clip(y, -LARGEST, LARGEST) for n, y in (("scale", scale), ("zero", low))}
        words = pack(codes.astype(jnp.uint32), self.word.bits)
        return {"words": words} | {n: y.astype(jnp.float8_e4m3fn) for n, y in kept.items()}

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        codes = unpack(data["words"], self.word.bits, width).astype(jnp.float32)
        scale, zero = (self._each(data[name].astype(jnp.float32)) for name in ("scale", "zero"))
        return (codes * scale + zero).astype(dtype)

    def _masks(self) -> list[Bool[Array, "*l 1 K 1 H"]]:
        """Say of every group which channels it has."""
        group = self.group[..., None, :, None, :]
        return [group == number for number in range(self.word.groups(group.shape[-1]))]

    def _each(self, x: Float[Array, "*b S G"]) -> Array:
        """Give every channel the number of its group, by comparing: a gather on a TPU would pad rows."""
        found = x[..., :1]
        for number, mine in enumerate(self._masks()):
            found = jnp.where(mine, x[..., number : number + 1], found)
        return found
