"""Encodes the difference between a row and the same token's row in the layer below (XQuant-CL)."""

from __future__ import annotations

import dataclasses
import math
from typing import NoReturn

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.base.checks import is_whole
from kvjax.state.codes import BELOW, Codec, CodecArrays, bind
from kvjax.store.predicted import PredictionError
from kvjax.store.wrap import WrappedCodec, Wrapper


@dataclasses.dataclass(frozen=True)
class OverBelow(Wrapper):
    """`OverBelow() >> codec` encodes x_l - y_(l-1) of layer l, y being what is decoded of the layer below.

    So y_l = y_(l-1) + decoded(x_l - y_(l-1)), and errors of lower layers do not add up (arXiv:2508.10395,
    section 3). It is for keys, or for layers that store one array. The lowest layer needs another codec
    (`FirstLayers`). tokens: how many are encoded together, since a layer can be decoded only after all layers
    below it. Raises ValueError if tokens < 1.
    """

    tokens: int = 32

    sees_below = True

    def __post_init__(self):
        if not is_whole(self.tokens):
            raise ValueError(f"tokens are encoded together, at least 1, got {self.tokens!r}")

    def around(self, codec: Codec) -> OverBelowCodec:
        return OverBelowCodec(self, codec)


@dataclasses.dataclass(frozen=True)
class OverBelowCodec(WrappedCodec):
    """Encodes by `codec` differences to the layer below."""

    word: OverBelow
    codec: Codec

    @property
    def granule(self) -> int:
        return math.lcm(self.word.tokens, self.codec.granule)

    @property
    def steady(self) -> bool:
        # The next time, the layer below is decoded from other codes.
        return False

    def bind(self, arrays: CodecArrays) -> Codec:
        inner = bind(self.codec, arrays)
        if BELOW not in arrays:
            return dataclasses.replace(self, codec=inner)
        return PredictionError(arrays[BELOW]["key"].astype(jnp.float32), inner)

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        self._alone()

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        self._alone()

    def _alone(self) -> NoReturn:
        raise ValueError(
            f"{self.word!r} got no layer below the rows, expected a method of kvjax, and another codec for "
            "the lowest layer: FirstLayers(1, codec, OverBelow() >> codec)"
        )
