"""Observations: what a layer must record while it attends, so that slots can be scored afterwards."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar.kinds import (
    IN_PREFILL,
    IN_STEP,
    AccumulatingObservation,
    Carried,
    Inputs,
    Observation,
    SlotObservation,
)
from kvjax.ops.attention.union import Reduction

BOTH = (IN_PREFILL, IN_STEP)


@dataclasses.dataclass(frozen=True)
class Queries(Carried):
    """The last `last` queries of every row, rotated, with their positions (-1 where a row is shorter).

    Args:
        last: how many.

    >>> Queries(32).last
    32
    """

    last: int
    phases = BOTH
    queries_alone = True

    def __call__(self, inputs: Inputs) -> tuple[Float[Array, "B N W H"], Int[Array, "B W"]]:
        count = (inputs.pos >= 0).sum(-1)
        index = count[:, None] - self.last + jnp.arange(self.last)[None]
        safe = jnp.maximum(index, 0)
        q = jnp.take_along_axis(inputs.q, safe[:, None, :, None], axis=2)
        return q, jnp.where(index >= 0, jnp.take_along_axis(inputs.pos, safe, axis=1), -1)

    def start(self, inputs: Inputs) -> tuple[Float[Array, "B N W H"], Int[Array, "B W"]]:
        b, n, _, h = inputs.q.shape
        return jnp.zeros((b, n, self.last, h), inputs.q.dtype), jnp.full((b, self.last), -1, jnp.int32)

    def carry(
        self, carried: tuple[Float[Array, "B N W H"], Int[Array, "B W"]], inputs: Inputs
    ) -> tuple[Float[Array, "B N W H"], Int[Array, "B W"]]:
        q = jnp.concatenate([carried[0], inputs.q], axis=2)
        pos = jnp.concatenate([carried[1], inputs.pos], axis=1)
        # Padding is at the right of new tokens: the carried queries and the new ones are before it.
        end = self.last + (inputs.pos >= 0).sum(-1, dtype=jnp.int32)
        index = end[:, None] - self.last + jnp.arange(self.last, dtype=jnp.int32)[None]
        return jnp.take_along_axis(q, index[:, None, :, None], axis=2), jnp.take_along_axis(
            pos, index, axis=1
        )

    def read(
        self, carried: tuple[Float[Array, "B N W H"], Int[Array, "B W"]]
    ) -> tuple[Float[Array, "B N W H"], Int[Array, "B W"]]:
        return carried


@dataclasses.dataclass(frozen=True)
class Mass(AccumulatingObservation):
    """The attention that every slot receives from all new queries, summed over the heads of its group.

    Attention records it while it runs; calling it raises TypeError.

    Args:
        reduce: "sum" or "max" of the probabilities, "squares" (the sum of p^2), or "count" (how often p >
            threshold).
        threshold: of "count".

    >>> Mass("max").reduce
    'max'
    """

    phases = BOTH

    reduce: str = "sum"
    threshold: float = 0.0

    @property
    def reduction(self) -> Reduction:
        return Reduction(self.reduce, self.threshold)

    def join(self, old: Float[Array, "*lists S"], new: Float[Array, "*lists S"]) -> Float[Array, "*lists S"]:
        """Combine the values from earlier and from new queries."""
        return self.reduction.join(old, new)

    def __call__(self, inputs: Inputs) -> NoReturn:
        raise TypeError("mass is recorded inside attention")


@dataclasses.dataclass(frozen=True)
class DecayedMass(Mass):
    """The sum of attention probabilities, where a query weighs rate^(number of newer queries).

    Args:
        rate: in (0, 1).

    >>> DecayedMass(rate=0.9).reduce
    'sum'
    """

    rate: float = 0.5

    def __post_init__(self):
        if self.reduce != "sum" or not 0 < self.rate < 1:
            raise ValueError(
                f"a fading mass is a sum with a rate between 0 and 1, got {self.reduce!r} and {self.rate!r}"
            )

    @property
    def reduction(self) -> Reduction:
        return Reduction("sum", fade=self.rate)


@dataclasses.dataclass(frozen=True)
class QueryCount(SlotObservation):
    """How many new queries can see a slot, its own token included; all heads of a token count as one query.

    >>> QueryCount() == QueryCount()
    True
    """

    phases = BOTH

    def of(
        self, q: Float[Array, "B N T H"], q_pos: Int[Array, "B T"], k: Float[Array, "B K S H"],
        pos: Int[Array, "B #K S"],
    ) -> Float[Array, "B K S"]:  # fmt: skip
        b, heads, slots, _ = k.shape
        live = (q_pos >= 0).sum(1, dtype=jnp.int32)
        # Queries are in token order, followed by padding.
        order = jnp.where(q_pos < 0, jnp.iinfo(jnp.int32).max, q_pos)
        older = jax.vmap(jnp.searchsorted)(order, pos.reshape(b, -1)).reshape(pos.shape).astype(jnp.int32)
        count = jnp.where(pos < 0, 0, live[:, None, None] - older)
        return jnp.broadcast_to(count.astype(jnp.float32), (b, heads, slots))


@dataclasses.dataclass(frozen=True)
class UnrotatedKeys(Observation):
    """The keys before rotation, for methods that store them so.

    >>> UnrotatedKeys() == UnrotatedKeys()
    True
    """

    def __call__(self, inputs: Inputs) -> Float[Array, "B K T H"]:
        return inputs.k_raw


@dataclasses.dataclass(frozen=True)
class QueryMoments(Carried):
    """Mean [B, N, H] and covariance [B, N, H, H] of the unrotated queries without the first `skip` ones.

    In decode steps, rows carry the count, the mean and the sum of squared deviations of their queries
    (Chan et al., 1983), in float32.

    Args:
        skip: how many of the first queries are left out.
        covariance: False computes the mean alone.

    >>> QueryMoments(skip=4).covariance
    True
    """

    phases = BOTH

    skip: int = 0
    covariance: bool = True

    def __call__(self, inputs: Inputs) -> tuple[Float[Array, "B N H"], Float[Array, "B N H H"] | None]:
        return self.read(self._of(inputs))

    def start(self, inputs: Inputs) -> tuple[Any, ...]:
        b, n, _, h = inputs.q_raw.shape
        spread = jnp.zeros((b, n, h, h), jnp.float32) if self.covariance else None
        return jnp.zeros((b,), jnp.float32), jnp.zeros((b, n, h), jnp.float32), spread

    def carry(self, carried: tuple[Any, ...], inputs: Inputs) -> tuple[Any, ...]:
        (n, mean, spread), (m, new_mean, new_spread) = carried, self._of(inputs)
        total = n + m
        share = (m / jnp.maximum(total, 1.0))[:, None, None]
        apart = new_mean - mean
        if spread is not None:
            between = jnp.einsum("bnh,bnj->bnhj", apart, apart)
            spread = spread + new_spread + between * (n[:, None, None] * share)[..., None]
        return total, mean + apart * share, spread

    def read(self, carried: tuple[Any, ...]) -> tuple[Float[Array, "B N H"], Float[Array, "B N H H"] | None]:
        count, mean, spread = carried
        return mean, None if spread is None else spread / jnp.maximum(count, 1.0)[:, None, None, None]

    def _of(self, inputs: Inputs) -> tuple[Any, ...]:
        """Return the count, the mean and the summed squared deviations of the new queries alone."""
        use = (inputs.pos >= self.skip).astype(jnp.float32)
        count = use.sum(-1)
        q = inputs.q_raw.astype(jnp.float32)
        mean = (q * use[:, None, :, None]).sum(2) / jnp.maximum(count, 1.0)[:, None, None]
        if not self.covariance:
            return count, mean, None
        apart = (q - mean[:, :, None]) * use[:, None, :, None]
        return count, mean, jnp.einsum("bnth,bntj->bnhj", apart, apart)


@dataclasses.dataclass(frozen=True)
class Hidden(Observation):
    """The layer's normalised input [B, T, D], from which queries, keys and values are projected.

    >>> Hidden() == Hidden()
    True
    """

    phases = BOTH

    def __call__(self, inputs: Inputs) -> Float[Array, "B T D"]:
        return inputs.hidden
