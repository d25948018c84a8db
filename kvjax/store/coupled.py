"""Neighbouring channels that share a code: vectors by codebooks that a fit finds for each head (CQ)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt

from kvjax.base.checks import is_whole
from kvjax.base.errors import InputError
from kvjax.grammar.fitted import Fitted, FittedEncoding, ModelSizes, check_sizes
from kvjax.ops.base.bit_packing import pack, unpack
from kvjax.state.codes import Codec, CodecArrays
from kvjax.store.levels import without_arrays

# Tokens that are encoded at a time.
PIECE = 256


@dataclasses.dataclass(frozen=True)
class CoupledCodes(Codec, FittedEncoding):
    """The nearest of 2^bits vectors for every `channels` channels of a row (arXiv:2405.03917, section 3.2).

    of: the vectors of keys or of values, the fitted array "key centroids" or "value centroids" [L, K, H / c,
    2^bits, c]. A number takes bits / channels bits and nothing else: rows have no scale. Stored are words
    [*b, S, w] of H / c codes. Raises ValueError for bits outside 1 to 8, or channels below 1 or that do not
    divide rows.
    """

    channels: int
    bits: int
    of: Literal["key", "value"]
    fitted: Fitted | None = None

    granule = 1
    by = "cq"

    def __post_init__(self):
        if not is_whole(self.bits, 1, 8):
            raise ValueError(f"a vector's code has 1 to 8 bits, got {self.bits!r}")
        if not is_whole(self.channels):
            raise ValueError(f"a vector is a whole number of channels, at least 1, got {self.channels!r}")
        if self.of not in ("key", "value"):
            raise ValueError(f"vectors are of a 'key' or a 'value', got {self.of!r}")

    @property
    def name(self) -> str:
        """The name of the fitted array."""
        return f"{self.of} centroids"

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted vectors are for another model, other `bits` or other `channels`."""
        assert self.fitted is not None
        check_sizes(self, "vectors", "layers, KV heads", self.name, (model.layers, model.kv_heads))
        vectors, entries, channels = self.fitted.arrays[self.name].shape[2:]
        if (entries, channels) != (2**self.bits, self.channels):
            raise InputError(
                f"it was fitted with {entries} vectors of {channels} channels, and bits={self.bits}, "
                f"channels={self.channels} ask for {2**self.bits} of {self.channels}: run "
                f"`kvjax fit {self.by} --set bits={self.bits},channels={self.channels}`"
            )
        if vectors * channels != model.head_dim:
            raise InputError(
                f"it was fitted to heads of {vectors * channels} channels, this model's have "
                f"{model.head_dim}: run `kvjax fit {self.by}` on this model"
            )

    def bind(self, arrays: CodecArrays) -> Codec:
        if self.fitted is None or self.fitted.digest not in arrays:
            return self
        return NearestVectors(self.bits, arrays[self.fitted.digest][self.name])

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        without_arrays(self)

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        without_arrays(self)


@dataclasses.dataclass(frozen=True, eq=False)
class NearestVectors(Codec):
    """The nearest of the vectors [*l, K, G, C, c] of a head, for rows [*l, B, K, S, G c].

    >>> codec = NearestVectors(1, jnp.array([[[[0.0, 0.0], [1.0, 2.0]]]]))
    >>> data = codec.encode(jnp.array([0.6, 1.4]).reshape(1, 1, 1, 2))
    >>> codec.decode(data, 2, jnp.float32).ravel().tolist()
    [1.0, 2.0]
    """

    bits: int
    vectors: Float[Array, "*l K G C c"]

    granule = 1

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        vectors = self.vectors.astype(jnp.float32)
        *_, heads, groups, _, channels = vectors.shape
        if (x.shape[-3], x.shape[-1]) != (heads, groups * channels):
            raise ValueError(
                f"vectors were fitted for {heads} heads of {groups * channels} channels, and these rows have "
                f"{x.shape[-3]} heads of {x.shape[-1]}"
            )
        half = jnp.square(vectors).sum(-1)[..., None, :, None, :, :] / 2

        def nearest(rows: Float[Array, "*b S H"]) -> UInt[Array, "*b S G"]:
            rows = rows.astype(jnp.float32).reshape(*rows.shape[:-1], groups, channels)
            # |x - c|^2 / 2 without |x|^2, which is the same for all.
            inner = jnp.einsum("...bksgc,...kgec->...bksge", rows, vectors, precision="highest")
            return (inner - half).argmax(-1).astype(jnp.uint32)

        return {"words": pack(piecewise(nearest, x), self.bits)}

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        groups = self.vectors.shape[-3]
        codes = unpack(data["words"], self.bits, groups).astype(jnp.int32)
        *lead, entries, channels = self.vectors.shape
        first = np.arange(math.prod(lead), dtype=np.int32).reshape(lead) * entries
        first = jnp.broadcast_to(first[..., None, :, None, :], codes.shape)
        found = self.vectors.reshape(-1, channels)[first + codes]
        return found.reshape(*codes.shape[:-1], width).astype(dtype)


def piecewise(encode: Callable[[Array], Array], x: Float[Array, "*b S H"]) -> Array:
    """Encode many tokens in pieces, because the distances of all tokens to all vectors would fill memory."""
    tokens = x.shape[-2]
    if tokens <= PIECE:
        return encode(x)
    whole = jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, -tokens % PIECE), (0, 0)])
    pieces = jnp.moveaxis(whole.reshape(*x.shape[:-2], -1, PIECE, x.shape[-1]), -3, 0)
    found = jnp.moveaxis(jax.lax.map(encode, pieces), 0, -3)
    return found.reshape(*x.shape[:-2], -1, found.shape[-1])[..., :tokens, :]
