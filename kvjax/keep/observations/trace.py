"""Traces: per-slot numbers that a method keeps from the token's arrival until the slot is evicted."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.kinds import AccumulatingObservation, Inputs, Observation, Observed, Trace
from kvjax.keep.observations.observe import DecayedMass, Mass, QueryCount


@dataclasses.dataclass(frozen=True)
class AccumulatedMass(Trace):
    """The attention `mass` that a slot has received from all queries since its token was read.

    Args:
        mass: the `Mass` or `DecayedMass` that is accumulated.

    >>> AccumulatedMass().needs
    frozenset({Mass(reduce='sum', threshold=0.0)})
    """

    mass: AccumulatingObservation = Mass()

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({self.mass})

    def start(self, inputs: Inputs, heads: int) -> Float[Array, "B K T"]:
        b, t = inputs.pos.shape
        return jnp.zeros((b, heads, t), jnp.float32)

    def grow(self, old: Float[Array, "*lists S"], seen: Observed) -> Float[Array, "*lists S"]:
        return self.mass.join(old, seen.of(self.mass))


@dataclasses.dataclass(frozen=True)
class Surprisal(Trace):
    """-log p(x_j | x_<j), the surprisal of a slot's token in nats, computed when a prompt is read.

    It is 0 for the first token of a prompt, a turn or a chunk, and for tokens appended by decode steps, for
    which the model's distribution is gone. It is known only after all layers, so `start` does not set it.

    >>> Surprisal().after_layers
    True
    """

    after_layers = True

    def start(self, inputs: Inputs, heads: int) -> Float[Array, "B K T"]:
        b, t = inputs.pos.shape
        return jnp.zeros((b, heads, t), jnp.float32)

    def grow(self, old: Float[Array, "*lists S"], seen: Observed) -> Float[Array, "*lists S"]:
        return old


@dataclasses.dataclass(frozen=True)
class AccumulatedDecayedMass(Trace):
    """The accumulated attention of a slot, where a query weighs rate^(number of newer tokens).

    Args:
        rate: in (0, 1).

    >>> AccumulatedDecayedMass(0.5).rate
    0.5
    """

    rate: float

    def __post_init__(self):
        DecayedMass(rate=self.rate)

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({DecayedMass(rate=self.rate), QueryCount()})

    def start(self, inputs: Inputs, heads: int) -> Float[Array, "B K T"]:
        b, t = inputs.pos.shape
        return jnp.zeros((b, heads, t), jnp.float32)

    def grow(self, old: Float[Array, "*lists S"], seen: Observed) -> Float[Array, "*lists S"]:
        faded = jnp.power(jnp.float32(self.rate), seen.of(QueryCount()))
        return old * faded + seen.of(DecayedMass(rate=self.rate))


@dataclasses.dataclass(frozen=True)
class ConstantTrace(Trace):
    """An observation of a token at the time it is read: one number per KV head [B, K, T], then constant.

    Args:
        observation: gives one number per token and KV head.

    >>> from kvjax.words import QueryCount
    >>> ConstantTrace(QueryCount()).observation
    QueryCount()
    """

    observation: Observation

    def start(self, inputs: Inputs, heads: int) -> Float[Array, "B K T"]:
        return self.observation(inputs)

    def grow(self, old: Float[Array, "*lists S"], seen: Observed) -> Float[Array, "*lists S"]:
        return old
