"""Quantisation errors, observed when a token is computed: later the original is gone."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.kinds import IN_PREFILL, IN_STEP, Inputs, Observation
from kvjax.state.codes import Codec, dense, encode


@dataclasses.dataclass(frozen=True)
class CodeError(Observation):
    """The relative error ||x - x'|| / ||x|| [B, K, T] of a codec: the mean of a token's key and value errors.

    Keys are rotated. 0 for a row of zeros. Raises ValueError for a codec that encodes several tokens
    together.
    """

    codec: Codec

    phases = (IN_PREFILL, IN_STEP)

    def __post_init__(self):
        if self.codec.granule > 1:
            raise ValueError(
                f"a token's error is asked for when it comes, and {self.codec!r} encodes "
                f"{self.codec.granule} together: use Affine(bits)"
            )

    def __call__(self, inputs: Inputs) -> Float[Array, "B K T"]:
        k = inputs.k_raw if inputs.k is None else inputs.k
        rows = [k] if inputs.v is None else [k, inputs.v]
        return sum(map(self._of, rows), jnp.float32(0)) / len(rows)

    def _of(self, x: Float[Array, "B K T H"]) -> Float[Array, "B K T"]:
        x = x.astype(jnp.float32)
        size = jnp.linalg.norm(x, axis=-1)
        return jnp.linalg.norm(x - dense(encode(x, self.codec)), axis=-1) / jnp.where(size == 0, 1.0, size)
