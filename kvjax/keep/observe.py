"""Observations: what a layer must record while it attends, so that slots can be scored afterwards."""

from __future__ import annotations

import dataclasses
from typing import NoReturn

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar import Inputs
from kvjax.words import IN_PREFILL, IN_STEP


@dataclasses.dataclass(frozen=True)
class Queries:
    """The last `last` queries of every row, rotated, with their positions (-1 where a row is shorter)."""

    last: int

    @property
    def phases(self) -> tuple[str, ...]:
        """A step has one query."""
        return (IN_PREFILL, IN_STEP) if self.last == 1 else (IN_PREFILL,)

    def __call__(self, inputs: Inputs) -> tuple[Float[Array, "B N W H"], Int[Array, "B W"]]:
        count = (inputs.pos >= 0).sum(-1)
        index = count[:, None] - self.last + jnp.arange(self.last)[None]
        safe = jnp.maximum(index, 0)
        q = jnp.take_along_axis(inputs.q, safe[:, None, :, None], axis=2)
        return q, jnp.where(index >= 0, jnp.take_along_axis(inputs.pos, safe, axis=1), -1)


@dataclasses.dataclass(frozen=True)
class Mass:
    """The attention probability every slot received from all new queries: "sum" or "max" over them.

    Attention records it while it runs, so this only asks for it; a call raises TypeError.
    """

    phases = (IN_PREFILL, IN_STEP)
    of_attention = True

    reduce: str = "sum"

    def __call__(self, inputs: Inputs) -> NoReturn:
        raise TypeError("mass is recorded inside attention")


@dataclasses.dataclass(frozen=True)
class RawKeys:
    """The keys before rotation, for methods that rotate by rank."""

    phases = (IN_PREFILL,)

    def __call__(self, inputs: Inputs) -> Float[Array, "B K T H"]:
        return inputs.k_raw


@dataclasses.dataclass(frozen=True)
class QueryMoments:
    """Mean [B, N, H] and covariance [B, N, H, H] of the unrotated queries without the first `skip`."""

    phases = (IN_PREFILL,)

    skip: int = 0
    covariance: bool = True

    def __call__(self, inputs: Inputs) -> tuple[Float[Array, "B N H"], Float[Array, "B N H H"] | None]:
        use = (inputs.pos >= self.skip).astype(jnp.float32)
        total = jnp.maximum(use.sum(-1), 1.0)
        q = inputs.q_raw.astype(jnp.float32) * use[:, None, :, None]
        mean = q.sum(2) / total[:, None, None]
        if not self.covariance:
            return mean, None
        centred = (inputs.q_raw.astype(jnp.float32) - mean[:, :, None]) * use[:, None, :, None]
        cov = jnp.einsum("bnth,bntj->bnhj", centred, centred) / total[:, None, None, None]
        return mean, cov
