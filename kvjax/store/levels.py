"""Codes by levels that need not be evenly spaced, for numbers scaled to one range (KVQuant).

`ByChannel` and `ByToken` scale numbers to [-1, 1], and `Levels` encodes these. Codecs hold their fitted
arrays; in a compiled program, `kvjax.state.codes.bind` passes the arrays to them.
"""

from __future__ import annotations

import dataclasses
from functools import reduce
from typing import Literal, NoReturn

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.base.checks import is_whole
from kvjax.base.errors import InputError
from kvjax.grammar.fitted import Fitted, FittedEncoding, FittedWord, ModelSizes, check_sizes
from kvjax.ops.base.bit_packing import halves, of_short, pack, pair, short, unpack
from kvjax.state.codes import Codec, CodecArrays, bind
from kvjax.store.wrap import WrappedCodec, Wrapper, joined, part_of


def without_arrays(word: object) -> NoReturn:
    """Raise ValueError for a fitted word that encodes outside of a program that passes it its arrays."""
    raise ValueError(f"{word!r} has nothing that it was fitted to at hand: use it in a method of kvjax")


@dataclasses.dataclass(frozen=True)
class Levels(Codec, FittedEncoding):
    """x ~ the nearest of 2^bits levels, which a fit finds for each layer (arXiv:2401.18079, section 3.3).

    of: the levels of keys or of values, the fitted array "key levels" or "value levels" [L, 2^bits], in
    ascending order. Stored are words [*b, S, w]. Raises ValueError for bits outside 1 to 4.
    """

    bits: int
    of: Literal["key", "value"]
    fitted: Fitted | None = None

    granule = 1
    by = "kvquant"

    def __post_init__(self):
        if not is_whole(self.bits, 1, 4):
            raise ValueError(f"bits must be 1, 2, 3 or 4, got {self.bits!r}")
        if self.of not in ("key", "value"):
            raise ValueError(f"levels are of a 'key' or a 'value', got {self.of!r}")

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes, or have other bits."""
        assert self.fitted is not None
        check_sizes(self, "levels", "layers", f"{self.of} levels", (model.layers,))
        found = self.fitted.arrays[f"{self.of} levels"].shape[1]
        if found != 2**self.bits:
            raise InputError(
                f"it was fitted with {found} levels, and {self.bits} bits have {2**self.bits}: run "
                f"`kvjax fit {self.by} --set bits={self.bits}`"
            )

    def bind(self, arrays: CodecArrays) -> Codec:
        if self.fitted is None or self.fitted.digest not in arrays:
            return self
        return NearestLevel(self.bits, arrays[self.fitted.digest][f"{self.of} levels"])

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        without_arrays(self)

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        without_arrays(self)


@dataclasses.dataclass(frozen=True, eq=False)
class NearestLevel(Codec):
    """The nearest of given levels [*l, 2^bits] for rows [*l, B, K, S, H]; halfway, the lower one.

    >>> import jax.numpy as jnp
    >>> codec = NearestLevel(1, jnp.array([-0.5, 0.25]))
    >>> data = codec.encode(jnp.array([-0.9, -0.2, 0.1, 3.0]).reshape(1, 1, 1, 4))
    >>> codec.decode(data, 4, jnp.float32).ravel().tolist()
    [-0.5, -0.5, 0.25, 0.25]
    """

    bits: int
    levels: Float[Array, "*l C"]

    granule = 1

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        x, levels = x.astype(jnp.float32), self.levels.astype(jnp.float32)
        bounds = (levels[..., 1:] + levels[..., :-1]) / 2
        codes = jnp.zeros(x.shape, jnp.uint32)
        for i in range(bounds.shape[-1]):
            bound = bounds[..., i].reshape(*bounds.shape[:-1], *(1,) * (x.ndim - bounds.ndim + 1))
            codes = codes + (x > bound).astype(jnp.uint32)
        return {"words": pack(codes, self.bits)}

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        codes = unpack(data["words"], self.bits, width)
        # Looked up by comparing: of a gather, a TPU would make one padded row of indices for every code.
        each = jnp.moveaxis(self.levels, -1, 0)
        each = each.reshape(*each.shape, *(1,) * (codes.ndim - each.ndim + 1))
        found = reduce(lambda x, i: jnp.where(codes == i, each[i], x), range(1, len(each)), each[0])
        return found.astype(dtype)


@dataclasses.dataclass(frozen=True)
class ByChannel(Wrapper, FittedWord):
    """`ByChannel(0.01) >> codec` scales every channel of a head to [-1, 1] by its fitted range.

    y = (x - centre) / range, where centre - range and centre + range are quantiles of the channel, with the
    share `share` of its numbers beyond them, half on each side (arXiv:2401.18079, sections 3.1 and 3.4). The
    fitted arrays are "key centre" and "key range" [L, K, H]. Numbers beyond the range have magnitudes above
    1, where an `Outliers` inside finds them. Raises ValueError for a share outside [0, 1].
    """

    share: float
    fitted: Fitted | None = None

    by = "kvquant"

    def __post_init__(self):
        if not 0 <= self.share <= 1:
            raise ValueError(f"what lies beyond a channel's range is a share in [0, 1], got {self.share!r}")

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        for name in ("key centre", "key range"):
            sizes = (model.layers, model.kv_heads, model.head_dim)
            check_sizes(self, name, "layers, KV heads, channels", name, sizes)

    def around(self, codec: Codec) -> ByChannelCodec:
        return ByChannelCodec(self, codec)


@dataclasses.dataclass(frozen=True)
class ByChannelCodec(WrappedCodec):
    """Rows whose channels are scaled to a range before `codec` encodes them."""

    channels: ByChannel
    codec: Codec

    def bind(self, arrays: CodecArrays) -> Codec:
        inner, fitted = bind(self.codec, arrays), self.channels.fitted
        if fitted is None or fitted.digest not in arrays:
            return dataclasses.replace(self, codec=inner)
        mine = arrays[fitted.digest]
        return BoundByChannel(mine["key centre"], mine["key range"], inner)

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        without_arrays(self.channels)

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        without_arrays(self.channels)


@dataclasses.dataclass(frozen=True, eq=False)
class BoundByChannel(WrappedCodec):
    """Encodes (x - centre) / size of rows [*l, B, K, S, H], for arrays [*l, K, H]; a size of 0 counts as 1.

    `codec` gets them in the dtype of the rows, in which it may store some of them.
    """

    centre: Float[Array, "*l K H"]
    size: Float[Array, "*l K H"]
    codec: Codec

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        if (x.shape[-3], x.shape[-1]) != self.centre.shape[-2:]:
            raise ValueError(
                f"channels were fitted for (heads, channels) {self.centre.shape[-2:]}, and these rows have "
                f"{(x.shape[-3], x.shape[-1])}"
            )
        centre, size = self._numbers()
        return self.codec.encode(((x.astype(jnp.float32) - centre) / size).astype(x.dtype))

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        centre, size = self._numbers()
        return (self.codec.decode(data, width, jnp.float32) * size + centre).astype(dtype)

    def _numbers(self) -> tuple[Array, Array]:
        size = jnp.where(self.size == 0, jnp.ones((), self.size.dtype), self.size)
        centre, size = (a.astype(jnp.float32)[..., None, :, None, :] for a in (self.centre, size))
        return centre, size


@dataclasses.dataclass(frozen=True)
class ByToken(Wrapper):
    """`ByToken() >> codec` scales every token of a head to [-1, 1] by its own smallest and largest number."""

    def around(self, codec: Codec) -> ByTokenCodec:
        return ByTokenCodec(codec)


@dataclasses.dataclass(frozen=True)
class ByTokenCodec(WrappedCodec):
    """Rows as (x - centre) / size, with centre = (max + min) / 2 and size = (max - min) / 2 of each row.

    Both have 16 bits, the halves of one uint32 [*b, S] (`pair`), and codes are of x by the rounded numbers. A
    row that was decoded has another range than before, so codes drift when they are encoded again.

    >>> import jax.numpy as jnp
    >>> codec = ByToken() >> NearestLevel(1, jnp.array([-1.0, 1.0]))
    >>> data = codec.encode(jnp.array([2.0, 6.0, 5.0, 3.0]).reshape(1, 1, 1, 4))
    >>> codec.decode(data, 4, jnp.float32).ravel().tolist()
    [2.0, 6.0, 6.0, 2.0]
    """

    codec: Codec

    @property
    def steady(self) -> bool:
        return False

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        x = x.astype(jnp.float32)
        low, high = x.min(-1), x.max(-1)
        size, centre = short((high - low) / 2), short((high + low) / 2)
        by = of_short(size)
        by = jnp.where(by == 0, 1.0, by)
        inner = self.codec.encode((x - of_short(centre)[..., None]) / by[..., None])
        return joined(token={"size_centre": pair(size, centre)}, rest=inner)

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        size, centre = (n[..., None] for n in halves(part_of(data, "token")["size_centre"]))
        return (self.codec.decode(part_of(data, "rest"), width, jnp.float32) * size + centre).astype(dtype)
