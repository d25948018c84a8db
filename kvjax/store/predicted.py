"""Encodes only the part of rows that cannot be predicted from the layer below (AQUA-KV)."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.grammar.fitted import Fitted, FittedEncoding, ModelSizes, check_sizes
from kvjax.state.codes import BELOW, Codec, CodecArrays, bind
from kvjax.store.levels import without_arrays
from kvjax.store.wrap import WrappedCodec, Wrapper


@dataclasses.dataclass(frozen=True)
class Predicted(Wrapper, FittedEncoding):
    """`Predicted("key") >> codec` encodes the error of a linear prediction of a row.

    A key is predicted from the keys of the layer below, a value from the keys of its own layer and the values
    of the layer below: those of all heads of the same token, as decoded (arXiv:2501.19392, section 3). The
    fitted arrays are "key weights" [L, K H, K V], "value weights" [L, 2 K H, K V] and "key bias" and "value
    bias" [L, K V]; those of the first layer, which has no layer below, are not used: store it by another
    codec (`FirstLayers`). tokens: how many are encoded together, since a layer can be decoded only after all
    layers below it.

    Raises ValueError for another `of`, and if tokens < 1.
    """

    of: Literal["key", "value"]
    tokens: int = 32
    fitted: Fitted | None = None

    by = "aqua-kv"
    sees_below = True

    def __post_init__(self):
        if self.of not in ("key", "value"):
            raise ValueError(f"what is predicted is a 'key' or a 'value', got {self.of!r}")
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 1:
            raise ValueError(f"tokens are encoded together, at least 1, got {self.tokens!r}")

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        width = model.kv_heads * model.head_dim
        sizes = (model.layers, width * (1 if self.of == "key" else 2), width)
        check_sizes(self, "predictor", "layers, channels in, channels out", f"{self.of} weights", sizes)
        check_sizes(self, "predictor", "layers, channels out", f"{self.of} bias", sizes[::2])

    def around(self, codec: Codec) -> PredictedCodec:
        return PredictedCodec(self, codec)


@dataclasses.dataclass(frozen=True)
class PredictedCodec(WrappedCodec):
    """Encodes by `codec` the errors of the predictions of `word`."""

    word: Predicted
    codec: Codec

    @property
    def granule(self) -> int:
        return math.lcm(self.word.tokens, self.codec.granule)

    @property
    def steady(self) -> bool:
        # The next time, the layer below is decoded from other codes.
        return False

    def bind(self, arrays: CodecArrays) -> Codec:
        inner, fitted = bind(self.codec, arrays), self.word.fitted
        if fitted is None or fitted.digest not in arrays or BELOW not in arrays:
            return dataclasses.replace(self, codec=inner)
        known, of, mine = arrays[BELOW], self.word.of, arrays[fitted.digest]
        asked = ("key",) if of == "key" else ("own key", "value")
        if not all(name in known for name in asked):
            return dataclasses.replace(self, codec=inner)
        rows = [known[name].astype(jnp.float32) for name in asked]
        return PredictionError(predicted(rows, mine[f"{of} weights"], mine[f"{of} bias"]), inner)

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        without_arrays(self.word)

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        without_arrays(self.word)


@dataclasses.dataclass(frozen=True, eq=False)
class PredictionError(WrappedCodec):
    """Encodes x - near, for rows x and their predictions near."""

    near: Float[Array, "*b S H"]
    codec: Codec

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        return self.codec.encode(x.astype(jnp.float32) - self.near)

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        return (self.codec.decode(data, width, jnp.float32) + self.near).astype(dtype)


def predicted(
    rows: list[Float[Array, "*b K S H"]], weights: Float[Array, "*l I O"], bias: Float[Array, "*l O"]
) -> Float[Array, "*b K S V"]:
    """[rows of all heads, side by side] W + b, by heads again; rows are [*l, B, K, S, H]."""
    flat = [jnp.swapaxes(x, -3, -2).reshape(*x.shape[:-3], x.shape[-2], -1) for x in rows]
    x = jnp.concatenate(flat, -1)
    out = jnp.einsum("...bsi,...io->...bso", x, weights.astype(x.dtype), precision="highest")
    out = out + bias.astype(x.dtype)[..., None, None, :]
    heads = rows[0].shape[-3]
    return jnp.swapaxes(out.reshape(*out.shape[:-1], heads, -1), -3, -2)
