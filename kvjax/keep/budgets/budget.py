"""Allocations: how a mean number of slots per KV head is distributed over heads and layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.base.errors import InputError
from kvjax.grammar import Budget
from kvjax.grammar.kinds import Allocation
from kvjax.keep.select import ranks


def rest_of_mean(budget: Budget, tokens: int, layers: int, heads: int) -> list[int]:
    """Return the most slots each layer can evict if its heads (or all layers) keep n slots on average."""
    return [heads * (tokens - budget.capacity(tokens))] * layers


def lengths_and_means(budget: Budget, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Row lengths 1 to `tokens`, and the mean number of slots per head that each length keeps."""
    length, ratio = np.arange(1, tokens + 1), budget.ratio
    if ratio is None:
        return length, np.minimum(length, int(budget.amount))
    return length, np.maximum(length * ratio.numerator // ratio.denominator, 1)


@dataclasses.dataclass(frozen=True)
class Uniform(Allocation):
    """Every KV head of every layer keeps n slots.

    >>> Uniform().uniform
    True
    """

    uniform = True

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * n] * layers

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        return jnp.broadcast_to(n[None, :, None], scores.shape[:3])


@dataclasses.dataclass(frozen=True)
class AcrossHeads(Allocation):
    """Ada-KV (arXiv:2407.11550): head counts come from where a layer's K * n best slots are.

    Args:
        floor: the share of n that every head keeps.
        blend: True is Algorithm 1's safeguard, count = (1 - floor) * flat count + floor * n, rounded so that
            the layer's total stays; False first gives every head its best max(1, floor * n) slots, then fills
            up from the ranking over all heads (kvpress).

    >>> AcrossHeads().uniform, AcrossHeads().across_layers
    (False, False)
    """

    floor: float = 0.2
    blend: bool = True

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * n] * layers

    def layer_rest(self, budget: Budget, tokens: int, layers: int, heads: int) -> list[int]:
        return rest_of_mean(budget, tokens, layers, heads)

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        layers, b, k, s = scores.shape
        safe = (n * round(self.floor * 1000)) // 1000
        if not self.blend:
            safe = jnp.maximum(safe, 1) if self.floor > 0 else safe
            safely = (ranks(scores) < safe[None, :, None, None]) & (scores > -jnp.inf)
            scores = jnp.where(safely, jnp.inf, scores)
        live = (scores > -jnp.inf).sum(-1)
        flat = ranks(scores.reshape(layers, b, k * s)).reshape(scores.shape)
        count = ((flat < (k * n)[None, :, None, None]) & (scores > -jnp.inf)).sum(-1)
        if self.blend:
            count = _blend(count, n, self.floor)
        return jnp.minimum(count, live).astype(jnp.int32)


def _blend(count: Int[Array, "L B K"], n: Int[Array, "B"], floor: float) -> Int[Array, "L B K"]:
    """(1 - floor) * count + floor * n, in thousandths; heads with the largest fractions are rounded up."""
    share = round(floor * 1000)
    exact = (1000 - share) * count + share * n[None, :, None]
    whole = exact // 1000
    short = n[None, :, None] * count.shape[-1] - whole.sum(-1, keepdims=True)
    return whole + (ranks((exact % 1000).astype(jnp.float32)) < short).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class AcrossLayers(Allocation):
    """KVzip (arXiv:2505.23416), non-uniform: keeps the L * K * n best slots over all layers.

    >>> AcrossLayers().across_layers
    True
    """

    across_layers = True

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * n] * layers

    def layer_rest(self, budget: Budget, tokens: int, layers: int, heads: int) -> list[int]:
        return rest_of_mean(budget, tokens, layers, heads)

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        layers, b, k, s = scores.shape
        flat = jnp.moveaxis(scores, 1, 0).reshape(b, layers * k * s)
        best = (ranks(flat) < (layers * k * n)[:, None]) & (flat > -jnp.inf)
        return jnp.moveaxis(best.reshape(b, layers, k, s), 0, 1).sum(-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Threshold(Allocation):
    """Keeps slots with a score of at least `threshold`, at least one per KV head; counts depend on the data.

    Args:
        threshold: the smallest score that is kept.

    >>> Threshold(0.1).uniform
    False
    """

    threshold: float

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * tokens] * layers

    def layer_rest(self, budget: Budget, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * (tokens - 1)] * layers

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        return jnp.maximum((scores >= self.threshold).sum(-1, dtype=jnp.int32), 1)


@dataclasses.dataclass(frozen=True)
class UpTo(Allocation):
    """Keeps slots with a score of at least `threshold`, at least one and at most n per KV head.

    Decode steps evict by the threshold, too, so the score must give all but the n best slots of a head a
    value below it; a score that does so sets `bounded = True`. With a budget of all tokens no such score is
    needed, and a prefill shrinks arrays to the slots in use (`kvjax.compress.capacity.as_used`).

    Args:
        threshold: the smallest score that is kept.

    >>> UpTo(0.1).uniform
    True
    """

    threshold: float
    uniform = True

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * n] * layers

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        found = (scores >= self.threshold).sum(-1, dtype=jnp.int32)
        return jnp.clip(found, 1, n[None, :, None])


@dataclasses.dataclass(frozen=True)
class PerLayer(Allocation):
    """Given shares per layer: a layer with share s keeps max(1, floor(s * n)) slots in every KV head.

    Args:
        shares: one per layer in which the method selects, rounded to thousandths; None keeps all slots of the
            layer.

    >>> PerLayer((0.5, None)).uniform
    False
    """

    shares: tuple[float | int | None, ...]
    of_budget = " in a layer of share 1"

    def __post_init__(self):
        given = [s for s in self.shares if s is not None]
        if not self.shares or not all(isinstance(s, float | int) and 1e-3 <= s <= 1e3 for s in given):
            raise ValueError(
                "shares must be one number from 0.001 to 1000 per layer, or None for a whole layer, "
                f"got {self.shares!r}"
            )

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        self._check(layers)
        return [heads * (tokens if s is None else min(int(_part(s, n)), tokens)) for s in self.shares]

    def layer_rest(self, budget: Budget, tokens: int, layers: int, heads: int) -> list[int]:
        self._check(layers)
        length, n = lengths_and_means(budget, tokens)
        kept = [length if s is None else np.maximum(_part(s, n), 1) for s in self.shares]
        return [heads * max(int((length - k).max()), 0) for k in kept]

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        self._check(scores.shape[0])
        live = (scores > -jnp.inf).sum(-1, dtype=jnp.int32)
        each = [
            live[i] if s is None else jnp.minimum(jnp.maximum(_part(s, n), 1)[:, None], live[i])
            for i, s in enumerate(self.shares)
        ]
        return jnp.stack(each).astype(jnp.int32)

    def fewest(self, n: int, tokens: int) -> int:
        """Count the slots per head in the layer with the smallest share."""
        return min((int(_part(s, n)) for s in self.shares if s is not None), default=2**30)

    @property
    def poorest(self) -> str:
        """The smallest share as text, for an error message."""
        given = [s for s in self.shares if s is not None]
        return f" in the layer of share {min(given)!r} of {self.shares!r}" if given else ""

    def mean(self, n: int) -> int:
        """Return the mean number of slots per head, over the layers with a share."""
        counts = [int(_part(s, n)) for s in self.shares if s is not None]
        return sum(counts) // max(len(counts), 1)

    def _check(self, layers: int) -> None:
        if layers != len(self.shares):
            raise InputError(
                f"per_layer was given {len(self.shares)} shares, {self.shares!r}, and the method selects in "
                f"{layers} layers of this model: give one share for each, None for one that is kept whole"
            )


def _part(share: float | int, n: Any) -> Any:
    """floor(share * n), at least 1, in thousandths so that the product fits in int32."""
    whole = round(share * 1000)
    count = n // 1000 * whole + n % 1000 * whole // 1000
    return max(count, 1) if isinstance(n, int) else count
