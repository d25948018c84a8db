"""Rows of which only some channels are stored, the same for tokens that are encoded together (ThinK)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.state.code_forms import is_steady
from kvjax.state.codes import Codec, CodecArrays, Thinning, bind
from kvjax.store.wrap import Wrapper, joined, part_of


@dataclasses.dataclass(frozen=True)
class QueryDrivenChannels(Wrapper, Thinning, FittedWord):
    """Keeps the floor(share * H) most important channels of every `tokens` tokens; the others become 0.

    A channel's importance is |q_c| |k_c|: the root of the mean square of a head's queries there, summed over
    its group, times the norm of these tokens' keys (ThinK, arXiv:2407.21018, section 3.2). fitted: "norms"
    [L, K, H] of queries, as `kvjax fit think` writes them; without them all channels of queries have the same
    weight. Stored are "values" [*b, S, m] in the order of their channels, in the dtype of the rows, and "at"
    [*b, S / tokens, m], the indices of these channels. codec: encodes the values, rows of m numbers, in turn,
    as in `QueryDrivenChannels(0.5, 32) >> Affine(2)`. Raises ValueError for a share outside (0, 1], no
    tokens, or a codec of more tokens than share their channels.

    >>> codec = QueryDrivenChannels(0.5, 2)
    >>> codec.decode(codec.encode(jnp.array([[1.0, 3.0], [1.0, 0.0]])), 2, jnp.float32).tolist()
    [[0.0, 3.0], [0.0, 0.0]]
    """

    share: float
    tokens: int
    fitted: Fitted | None = None
    codec: Codec | None = None

    by = "think"
    fit_first = False

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise ValueError(f"what stays is a share of the channels in (0, 1], got {self.share!r}")
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 1:
            raise ValueError(f"channels are chosen for a whole number of tokens >= 1, got {self.tokens!r}")
        if self.codec is not None and self.tokens % self.codec.granule:
            raise ValueError(
                f"channels are chosen for {self.tokens} tokens, and {self.codec!r} encodes "
                f"{self.codec.granule} of them together: choose them for a multiple of these (group=)"
            )

    def around(self, codec: Codec) -> Codec:
        inner = codec if self.codec is None else self.codec.around(codec)  # type: ignore[attr-defined]
        return dataclasses.replace(self, codec=inner)

    @property
    def granule(self) -> int:
        return self.tokens

    @property
    def steady(self) -> bool:
        return is_steady(self.codec)

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        sizes = (model.layers, model.kv_heads, model.head_dim)
        check_sizes(self, "norms", "layers, KV heads, channels", "norms", sizes)

    def count(self, width: int) -> int:
        """How many of `width` channels are kept."""
        # Rounded first, because 0.29 * 100 is slightly below 29 in floating point.
        return max(1, int(round(self.share * width, 9)))

    def bind(self, arrays: CodecArrays) -> Codec:
        word = self if self.codec is None else dataclasses.replace(self, codec=bind(self.codec, arrays))
        if self.fitted is None or self.fitted.digest not in arrays:
            return word
        return _BoundChannels(word, arrays[self.fitted.digest]["norms"])

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        return self.encode_by(x, jnp.ones((), jnp.float32))

    def encode_by(self, x: Float[Array, "*b S H"], norms: Array) -> dict[str, Array]:
        """Codes by the norms of queries, of as many axes as granules have, or of none."""
        if x.shape[-2] % self.tokens:
            raise ValueError(f"{x.shape[-2]} tokens cannot be encoded {self.tokens} at a time")
        rows = x.reshape(*x.shape[:-2], -1, self.tokens, x.shape[-1])
        square = jnp.square(rows.astype(jnp.float32)).sum(-2) * jnp.square(norms)
        # Sorting rows keeps them on their devices; XLA would gather all rows for a top_k.
        best = jnp.argsort(-square, axis=-1, stable=True)[..., : self.count(x.shape[-1])]
        at: Int[Array, "*b G m"] = jnp.sort(best, -1)
        values = jnp.take_along_axis(rows, at[..., None, :], -1)
        kind = jnp.uint8 if x.shape[-1] <= 256 else jnp.uint16
        values, at = values.reshape(*x.shape[:-1], -1), at.astype(kind)
        if self.codec is None:
            return {"values": values, "at": at}
        return {"at": at, **joined(values=self.codec.encode(values))}

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        channel = jnp.arange(width, dtype=jnp.int32)
        at = data["at"].astype(jnp.int32)[..., None]
        # The place of every channel among the kept ones, found by comparing: a gather on a TPU would pad
        # rows.
        there = at == channel.reshape(*(1,) * (at.ndim - 1), -1)
        values = self._values(data, at.shape[-2], dtype)
        rows = values.reshape(*at.shape[:-2], self.tokens, at.shape[-2])
        picked = jnp.einsum("...tm,...mh->...th", rows, there.astype(rows.dtype), precision="highest")
        return picked.reshape(*values.shape[:-1], width).astype(dtype)

    def _values(self, data: dict[str, Array], count: int, dtype: DTypeLike) -> Float[Array, "*b S m"]:
        if self.codec is None:
            return data["values"]
        return self.codec.decode(part_of(data, "values"), count, dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class _BoundChannels(Codec):
    """`QueryDrivenChannels` bound to the norms [*l, K, H] of its layers, for rows [*l, B, K, S, H]."""

    word: QueryDrivenChannels
    norms: Float[Array, "*l K H"]

    @property
    def granule(self) -> int:
        return self.word.granule

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        return self.word.encode_by(x, self.norms[..., None, :, None, :])

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        return self.word.decode(data, width, dtype)
