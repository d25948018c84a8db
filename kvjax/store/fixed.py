"""Codes with fixed ranges found by a fit, so that tokens have no scales of their own."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.base.checks import is_whole
from kvjax.grammar.fitted import Fitted, FittedEncoding, ModelSizes, check_sizes
from kvjax.ops.base.bit_packing import pack, unpack
from kvjax.state.codes import Codec, CodecArrays
from kvjax.store.levels import without_arrays


@dataclasses.dataclass(frozen=True)
class StaticAffine(Codec, FittedEncoding):
    """x ~ low + code * step, with a fitted low and step per head, and codes of `bits` bits.

    Numbers beyond the range are clipped. of: the range of keys, the fitted arrays "key low" and "key step"
    [L, K], or the same of values. by: the method whose fit finds them. Stored are uint8 codes [*b, S, H] for
    8 bits, or words [*b, S, w], and nothing else. Raises ValueError for bits outside 1 to 8, and another
    `of`.
    """

    bits: int
    of: Literal["key", "value"]
    by: str
    fitted: Fitted | None = None

    granule = 1

    def __post_init__(self):
        if not is_whole(self.bits, 1, 8):
            raise ValueError(f"codes of a fixed range have 1 to 8 bits, got {self.bits!r}")
        if self.of not in ("key", "value"):
            raise ValueError(f"a range is of a 'key' or a 'value', got {self.of!r}")

    @property
    def says(self) -> str:
        return f"{self.bits} bits a number, in a range that a fit found for each head."

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        for name in (f"{self.of} low", f"{self.of} step"):
            check_sizes(self, "ranges", "layers, KV heads", name, (model.layers, model.kv_heads))

    def bind(self, arrays: CodecArrays) -> Codec:
        if self.fitted is None or self.fitted.digest not in arrays:
            return self
        mine = arrays[self.fitted.digest]
        return BoundStaticAffine(self.bits, mine[f"{self.of} low"], mine[f"{self.of} step"])

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        without_arrays(self)

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        without_arrays(self)


@dataclasses.dataclass(frozen=True, eq=False)
class BoundStaticAffine(Codec):
    """low + code * step of rows [*l, B, K, S, H], for arrays [*l, K]; a step of 0 counts as 1.

    >>> codec = BoundStaticAffine(2, jnp.array([[-1.0]]), jnp.array([[1.0]]))
    >>> data = codec.encode(jnp.array([-7.0, 0.2, 0.8, 9.0]).reshape(1, 1, 1, 1, 4))
    >>> codec.decode(data, 4, jnp.float32).ravel().tolist()
    [-1.0, 0.0, 1.0, 2.0]
    """

    bits: int
    low: Float[Array, "*l K"]
    step: Float[Array, "*l K"]

    granule = 1

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        if x.shape[-3] != self.low.shape[-1]:
            raise ValueError(
                f"ranges were fitted for {self.low.shape[-1]} heads, and these rows have {x.shape[-3]}"
            )
        low, step = self._numbers()
        codes = jnp.clip(jnp.round((x.astype(jnp.float32) - low) / step), 0, 2**self.bits - 1)
        if self.bits == 8:
            return {"codes": codes.astype(jnp.uint8)}
        return {"words": pack(codes.astype(jnp.uint32), self.bits)}

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        codes = data["codes"] if self.bits == 8 else unpack(data["words"], self.bits, width)
        low, step = self._numbers()
        return (codes.astype(jnp.float32) * step + low).astype(dtype)

    def _numbers(self) -> tuple[Array, Array]:
        step = jnp.where(self.step == 0, jnp.ones((), self.step.dtype), self.step)
        low, step = (a.astype(jnp.float32)[..., None, :, None, None] for a in (self.low, step))
        return low, step
