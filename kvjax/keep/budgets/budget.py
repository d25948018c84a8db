"""Allocations: how a mean number of slots per head is shared between heads and layers."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.base.errors import InputError
from kvjax.grammar import Budget
from kvjax.keep.select import ranks

# What the host computes with numpy and the program with jax.numpy, by the same lines.
Counts = Array | np.ndarray


def rest_of_mean(budget: Budget, tokens: int, layers: int, heads: int) -> list[int]:
    """Most slots per layer that do not stay, where heads, together or over all layers, keep the mean."""
    return [heads * (tokens - budget.capacity(tokens))] * layers


def _lengths(budget: Budget, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of 1 to `tokens` tokens, and the slots that their heads keep in the mean."""
    length, ratio = np.arange(1, tokens + 1), budget.ratio
    if ratio is None:
        return length, np.minimum(length, int(budget.amount))
    return length, np.maximum(length * ratio.numerator // ratio.denominator, 1)


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Every head of every layer keeps n slots.

    >>> Uniform().uniform
    True
    """

    uniform = True
    across_layers = False

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * n] * layers

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        return jnp.broadcast_to(n[None, :, None], scores.shape[:3])


@dataclasses.dataclass(frozen=True)
class AcrossHeads:
    """Ada-KV (arXiv:2407.11550): a layer's K * n best slots, wherever they lie, decide the head counts.

    Args:
        floor: the share of n that every head keeps.
        blend: True is Algorithm 1's safeguard, count = (1 - floor) * flat count + floor * n, rounded so that
            the layer's total stays; False gives every head its best max(1, floor * n) slots first and fills
            up from the flat ranking (kvpress).

    >>> AcrossHeads().uniform, AcrossHeads().across_layers
    (False, False)
    """

    floor: float = 0.2
    blend: bool = True
    uniform = False
    across_layers = False

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * n] * layers

    layer_rest = staticmethod(rest_of_mean)

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
    """(1 - floor) * count + floor * n in thousandths; the remainders go to the largest fractions."""
    share = round(floor * 1000)
    exact = (1000 - share) * count + share * n[None, :, None]
    whole = exact // 1000
    short = n[None, :, None] * count.shape[-1] - whole.sum(-1, keepdims=True)
    return whole + (ranks((exact % 1000).astype(jnp.float32)) < short).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class AcrossLayers:
    """KVzip (arXiv:2505.23416), non-uniform: the L * K * n best slots of the whole stack stay.

    >>> AcrossLayers().across_layers
    True
    """

    uniform = False
    across_layers = True

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * n] * layers

    layer_rest = staticmethod(rest_of_mean)

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        layers, b, k, s = scores.shape
        flat = jnp.moveaxis(scores, 1, 0).reshape(b, layers * k * s)
        best = (ranks(flat) < (layers * k * n)[:, None]) & (flat > -jnp.inf)
        return jnp.moveaxis(best.reshape(b, layers, k, s), 0, 1).sum(-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Threshold:
    """Every slot whose score is at least `threshold` stays, at least one in every head: counts are data.

    Args:
        threshold: in units of the score.

    >>> Threshold(0.1).uniform
    False
    """

    threshold: float
    uniform = False
    across_layers = False

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * tokens] * layers

    def layer_rest(self, budget: Budget, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * (tokens - 1)] * layers

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        return jnp.maximum((scores >= self.threshold).sum(-1, dtype=jnp.int32), 1)


@dataclasses.dataclass(frozen=True)
class UpTo:
    """Slots whose score is at least `threshold` stay, at least one and at most n in every head.

    In steps, too, slots are evicted by their own score: all but the n best have one below the threshold. A
    score that sees to that says `bounded = True`; a budget of everything needs none, and then a prefill cuts
    arrays to what is in use (`kvjax.compress.capacity.as_used`).

    Args:
        threshold: in units of the score.

    >>> UpTo(0.1).uniform
    True
    """

    threshold: float
    uniform = True
    across_layers = False

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * n] * layers

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        found = (scores >= self.threshold).sum(-1, dtype=jnp.int32)
        return jnp.clip(found, 1, n[None, :, None])


@dataclasses.dataclass(frozen=True)
class PerLayer:
    """Counts per layer as given: a layer of share s keeps max(1, floor(s * n)) slots in every head.

    Args:
        shares: one for each layer that the method selects in, taken in thousandths; None keeps the whole
            layer.

    >>> PerLayer((0.5, None)).uniform
    False
    """

    shares: tuple[float | int | None, ...]
    uniform = False
    across_layers = False

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
        length, n = _lengths(budget, tokens)
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

    def fewest(self, n: int) -> int:
        """Slots that the layer of the smallest share keeps in every head."""
        return min((int(_part(s, n)) for s in self.shares if s is not None), default=2**30)

    @property
    def poorest(self) -> str:
        """The smallest share, in words, for an error message."""
        given = [s for s in self.shares if s is not None]
        return f" in the layer of share {min(given)!r} of {self.shares!r}" if given else ""

    def mean(self, n: int) -> int:
        """Slots per head, the mean over the layers that have a share."""
        counts = [int(_part(s, n)) for s in self.shares if s is not None]
        return sum(counts) // max(len(counts), 1)

    def _check(self, layers: int) -> None:
        if layers != len(self.shares):
            raise InputError(
                f"per_layer was given {len(self.shares)} shares, {self.shares!r}, and the method selects in "
                f"{layers} layers of this model: give one share for each, None for one that is kept whole"
            )


def _part(share: float | int, n: Any) -> Any:
    """floor(share * n) in thousandths, without a product that int32 cannot hold; at least 1."""
    whole = round(share * 1000)
    count = n // 1000 * whole + n % 1000 * whole // 1000
    return max(count, 1) if isinstance(n, int) else count


@dataclasses.dataclass(frozen=True)
class Pyramid:
    """PyramidKV (arXiv:2406.02069, section 4.2): counts fall linearly from the first layer to the last.

    "paper": every layer keeps `window` slots and a share of the rest. The last layer's share is
    (n - window) / beta, the first layer's as much above the mean as the last one's lies below it, but at most
    what the prompt has. Counts are rounded so that the stack keeps L * n. Prompts shorter than 2 (n - window)
    tokens keep n slots in every layer, as in the authors' code.
    "kvpress": a layer's share includes the window, each layer is rounded alone, and all layers keep the mean
    where the smallest share would be less than the window.

    Args:
        beta: how steep; counts are exact at any length if it is a whole number.
        window: slots that every layer keeps.
        variant: "paper" or "kvpress".
        budget: needed by "kvpress", whose mean is ratio * length before it is rounded down to n.

    >>> Pyramid(window=8).variant
    'paper'
    """

    beta: float = 20.0
    window: int = 0
    variant: str = "paper"
    budget: Budget | None = None
    uniform = False
    across_layers = False

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        live = (scores > -jnp.inf).sum(-1, dtype=jnp.int32).max((0, 2))
        # In a cache that was compressed before, a row has fewer slots than tokens. It has at least the tokens
        # that a mean of n takes.
        length = jnp.maximum(live, self._shortest(jnp, n))
        if self.variant == "kvpress":
            count = self._kvpress(n[None], self._floored_off(live, n)[None], length[None], scores.shape[0])
        else:
            count = self._paper(jnp, n[None], length[None], scores.shape[0])
        return jnp.broadcast_to(count[..., None], scores.shape[:3])

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        # For a given mean, a layer's count only grows or only falls with the length of the prompt, from the
        # mean on, so the shortest and the longest prompt give the largest count.
        mean = np.arange(1, n + 1)[None]
        if self.variant == "paper":
            ends = (self._shortest(np, mean), np.full_like(mean, tokens))
            rows = [self._paper(np, mean, length, layers) for length in ends]
        else:
            rows = [self._kvpress_most(mean + part, mean, tokens, layers) for part in (0.0, 0.999)]
        return [heads * min(int(x), tokens) for x in np.concatenate(rows, 1).max(1)]

    def layer_rest(self, budget: Budget, tokens: int, layers: int, heads: int) -> list[int]:
        if self.variant != "paper":
            return [heads * (tokens - 1)] * layers
        length, n = _lengths(budget, tokens)
        kept = self._paper(np, n[None], np.maximum(length, self._shortest(np, n))[None], layers)
        return [heads * max(int(x), 0) for x in (length - kept).max(1)]

    def _kvpress_most(self, mean: np.ndarray, n: np.ndarray, tokens: int, layers: int) -> np.ndarray:
        """Most slots [L, n] that a layer keeps for each mean, over prompts of at most `tokens` tokens."""
        # The first layer's share, for the shortest and for the longest prompt.
        low, high = (
            np.minimum(2 * mean - mean / self.beta, length - self.window)
            for length in (self._shortest(np, n), tokens)
        )
        # Where the first layer's share exceeds this, the last layer's is less than the window. Then, and
        # where it is less than the mean, all layers keep the mean.
        steepest = 2 * mean - self.window
        flat = (low < mean) | (high > steepest)
        high = np.minimum(high, steepest)
        depth = np.arange(layers)[:, None] / max(layers - 1, 1)
        shares = [
            top - 2 * depth * (top - mean) for top in (np.clip(low, mean, np.maximum(high, mean)), high)
        ]
        pyramid = np.where(high >= mean, np.maximum(*shares), 0.0)
        return np.ceil(np.where(flat | (high < mean), np.maximum(pyramid, mean), pyramid))

    def _shortest(self, xp: ModuleType, n: Counts) -> Counts:
        """The fewest tokens a row can have where its budget comes to n slots; xp is numpy or jax.numpy."""
        ratio = None if self.budget is None else self.budget.ratio
        return n if ratio is None else xp.where(n == 1, n, -(-n * ratio.denominator // ratio.numerator))

    def _floored_off(self, length: Int[Array, "B"], n: Int[Array, "B"]) -> Float[Array, "B"]:
        """The fraction that rounding ratio * length down to n cut off; 0 where n is not that number."""
        ratio = None if self.budget is None else self.budget.ratio
        if ratio is None:
            return jnp.zeros(n.shape, jnp.float32)
        whole, rest = jnp.divmod(length * ratio.numerator, ratio.denominator)
        return jnp.where(whole == n, rest.astype(jnp.float32) / ratio.denominator, 0.0)

    def _paper(self, xp: ModuleType, n: Counts, length: Counts, layers: int) -> Counts:
        """Counts [L, B] with the array module xp; n and length are integers [1, B]."""
        depth = xp.arange(layers, dtype=xp.int32)[:, None].astype(xp.float32)
        whole = xp.maximum(n - self.window, 0).astype(xp.int32)
        spare = whole.astype(xp.float32)
        high = xp.minimum(2 * spare - spare / self.beta, (length - self.window).astype(xp.float32))
        high = xp.where(length < 2 * whole, spare, high)
        low = 2 * spare - high
        share = high - depth * (high - low) / max(layers - 1, 1)
        # Rounded running totals keep the stack's total at L * n.
        total = xp.round(xp.cumsum(share, 0)).astype(xp.int32)
        total = xp.concatenate([xp.zeros_like(total[:1]), total[:-1], layers * whole])
        return total[1:] - total[:-1] + xp.minimum(n, self.window).astype(xp.int32)

    def _kvpress(
        self, n: Int[Array, "1 B"], part: Float[Array, "1 B"], length: Int[Array, "1 B"], layers: int
    ) -> Int[Array, "L B"]:
        """Counts where the mean is n + part.

        Each number is a pair (integer, float) that stands for their sum: in a single float32, the fractions
        that decide how counts are rounded would be lost from about 10^5 tokens on.
        """

        def floating(x: Array) -> Array:
            return x.astype(jnp.float32)

        depth = jnp.arange(layers, dtype=jnp.int32)[:, None]
        few = jnp.floor(floating(n) / self.beta).astype(jnp.int32)
        low = (few, (floating(n) - floating(few) * self.beta + part) / self.beta)
        high = (2 * n - few, 2 * part - low[1])
        room = length - self.window
        full = floating(high[0] - room) + high[1] >= 0
        low = (jnp.where(full, 2 * n - room, low[0]), jnp.where(full, 2 * part, low[1]))
        high = (jnp.where(full, room, high[0]), jnp.where(full, 0.0, high[1]))
        steep = floating(length - high[0]) - high[1] >= 0
        steep &= floating(high[0] - low[0]) + (high[1] - low[1]) >= 0
        steep &= floating(low[0] - self.window) + low[1] >= 0
        steps = max(layers - 1, 1)
        fall, left = jnp.divmod(depth * (high[0] - low[0]), steps)
        rest = high[1] - (floating(left) + floating(depth) * (high[1] - low[1])) / steps
        return jnp.where(steep, _round(high[0] - fall, rest), jnp.maximum(_round(n, part), 1))


def _round(whole: Int[Array, "l B"], part: Float[Array, "l B"]) -> Int[Array, "l B"]:
    """Rounds whole + part to the nearest integer, halves to the even one."""
    base = jnp.floor(part)
    whole, part = whole + base.astype(jnp.int32), part - base
    up = (part > 0.5) | ((part == 0.5) & (whole % 2 == 1))
    return whole + up.astype(jnp.int32)
