"""NVFP4: blocks of 16 numbers of 4 bits, a float8 scale for each, and a float32 scale for all of a row."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt32

from kvjax.state.codes import Codec
from kvjax.store.blocks import blocked, check_block, found, stored
from kvjax.store.minifloats import FORMATS, of_codes, to_codes

_NUMBER, _SCALE = FORMATS["e2m1"], FORMATS["e4m3"]
# The largest scale of a block; if a block's largest number may become 4, there must be room for 1.5 times it.
_MOST, _MOST_OF_TWO = 448.0, 256.0


@dataclasses.dataclass(frozen=True)
class NvFloat4(Codec):
    """x ~ a s p: numbers p of e2m1, a scale s of e4m3 per `block` channels, a float32 a of the whole tensor.

    s is the e4m3 nearest to max |x| / (6 a) of the block, so that its largest number becomes 6, the format's
    largest. scale: a, which servers get by calibration; None: a = max |x| / (6 448) of every token of a head,
    whose largest block then has the scale 448. two: the largest number of a block may become 4 in place of 6,
    if the block's squared error is smaller, and a = max |x| / (6 256) (four over six, arXiv:2512.02010).
    Stored are words of 4 bits, "scales" uint8 [*b, S, H / block], and, without `scale`, "tensor" float32 [*b,
    S]. Raises ValueError for a scale that is not a positive number.

    >>> x = jnp.array([[6.0, 4.4, 4.4, 4.4, 4.4, 1.5, 1.5, 3.0]])
    >>> for codec in (NvFloat4(8), NvFloat4(8, two=True)):
    ...     codec.decode(codec.encode(x), 8, jnp.float32).round(2).tolist()
    [[6.0, 4.0, 4.0, 4.0, 4.0, 1.5, 1.5, 3.0]]
    [[6.0, 4.5, 4.5, 4.5, 4.5, 1.5, 1.5, 3.0]]
    """

    block: int = 16
    scale: float | None = None
    two: bool = False

    granule = 1

    def __post_init__(self):
        check_block(self.block)
        if self.scale is not None and not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"the scale of a tensor is a positive number, or None, got {self.scale!r}")

    @property
    def says(self) -> str:
        of = "and a float32 for each token" if self.scale is None else f"times {self.scale:g}"
        return f"4 bits a number, with a float8 scale for {self.block} channels, {of}."

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        rows = blocked(x.astype(jnp.float32), self.block)
        largest = jnp.abs(rows).max(-1)
        if self.scale is None:
            most = _MOST_OF_TWO if self.two else _MOST
            tensor = largest.max(-1) / (_NUMBER.largest * most)
            kept = {"tensor": tensor}
        else:
            tensor, kept = jnp.full(largest.shape[:-1], self.scale, jnp.float32), {}
        # A row of zeros has the scale 0, and its codes are 0.
        by = jnp.where(tensor == 0, 1.0, tensor)[..., None]
        scales, codes = self._coded(rows, to_codes(largest / by / 6, _SCALE), by)
        if self.two:
            larger, others = self._coded(rows, to_codes(largest / by / 4, _SCALE), by)
            errors = [
                jnp.square(self._rows(s, c, by) - rows).sum(-1)
                for s, c in ((scales, codes), (larger, others))
            ]
            less = errors[1] < errors[0]
            scales, codes = jnp.where(less, larger, scales), jnp.where(less[..., None], others, codes)
        return {"scales": scales.astype(jnp.uint8), **kept, **stored(codes.reshape(x.shape), 4)}

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        codes = blocked(found(data, 4, width), self.block)
        tensor = jnp.float32(self.scale) if self.scale is not None else data["tensor"][..., None]
        rows = self._rows(data["scales"].astype(jnp.uint32), codes, tensor)
        return rows.reshape(*rows.shape[:-2], width).astype(dtype)

    def _coded(
        self, rows: Float[Array, "*b groups block"], scales: UInt32[Array, "*b groups"], tensor: Array
    ) -> tuple[Array, Array]:
        """Scales, and the codes of rows by them."""
        by = of_codes(scales, _SCALE) * tensor
        by = jnp.where(by == 0, jnp.inf, by)
        return scales, to_codes(rows / by[..., None], _NUMBER)

    def _rows(self, scales: Array, codes: Array, tensor: Array) -> Float[Array, "*b groups block"]:
        return of_codes(codes, _NUMBER) * (of_codes(scales, _SCALE) * tensor)[..., None]
