"""LongRoPE: one set of divisors of the frequencies for short rows, and one for long rows."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.ops.base.rope import Rope, last_axis


@dataclasses.dataclass(frozen=True)
class LongRope(Rope):
    """Frequencies theta^(-2i/H) / factor_i, with other factors for rows of more than `original_max` tokens.

    LongRoPE (arXiv:2402.13753), eq. 2, as Phi-3 has it: `short_factor` or `long_factor`, [H/2] each. Cos and
    sin are multiplied by sqrt(1 + ln(factor) / ln(original_max)), or by `attention_factor`.

    >>> LongRope(short_factor=(1.0, 2.0), long_factor=(4.0, 8.0)).frequencies(4).tolist()
    [1.0, 0.005]
    """

    KINDS: ClassVar[tuple[str, ...]] = ("longrope",)
    kind: str = "longrope"
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        both = (*self.short_factor, *self.long_factor)
        if len(self.short_factor) != len(self.long_factor) or not self.short_factor or min(both) <= 0:
            raise ValueError(
                f"longrope needs as many short as long factors above 0, got {len(self.short_factor)} and "
                f"{len(self.long_factor)}"
            )

    @property
    def by_length(self) -> bool:
        return True

    def frequencies(self, head_dim: int) -> np.ndarray:
        return self._divided(head_dim, self.short_factor)

    def frequencies_at(
        self, head_dim: int, length: Int[Array, "*s"], dtype: DTypeLike
    ) -> Float[Array, "*s h"]:
        short, long = (
            last_axis(self._divided(head_dim, factors), length.ndim, dtype)
            for factors in (self.short_factor, self.long_factor)
        )
        return jnp.where((length > self.original_max)[..., None], long, short)

    def _divided(self, head_dim: int, factors: tuple[float, ...]) -> np.ndarray:
        dim = self.turning(head_dim)
        if dim != 2 * len(factors):
            raise ValueError(
                f"longrope has {len(factors)} factors, expected {dim // 2}: one for each pair of the {dim} "
                "channels that turn"
            )
        return self.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim) / np.asarray(factors)

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor <= 1 else math.sqrt(1 + math.log(self.factor) / math.log(self.original_max))
