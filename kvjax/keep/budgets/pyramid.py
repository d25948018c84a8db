"""Pyramidal budgets of layers: they fall with depth around a mean."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.grammar import Budget
from kvjax.grammar.kinds import Allocation
from kvjax.keep.budgets.budget import lengths_and_means

# Computed on the host with numpy or inside a program with jax.numpy, by the same code.
Counts = Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Pyramid(Allocation):
    """PyramidKV (arXiv:2406.02069, section 4.2): counts fall linearly from the first layer to the last.

    "paper": every layer keeps `window` slots and a share of the rest. The last layer's share is (n - window)
    / beta; the first layer's share exceeds the mean by as much as the last one falls short, but is at most
    the length of the prompt. Counts are rounded so that all layers together keep L * n. Prompts shorter than
    2 (n - window) tokens keep n slots in every layer, as in the authors' code. "kvpress": a layer's share
    includes the window, each layer is rounded alone, and all layers keep the mean if the smallest share would
    be less than the window.

    Args:
        beta: how steeply counts fall; counts are exact at any length if beta is a whole number.
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
    poorest = " in the last layer"

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        live = (scores > -jnp.inf).sum(-1, dtype=jnp.int32).max((0, 2))
        # After an earlier compression a row has fewer slots than tokens. Its length is at least the shortest
        # prompt whose budget is n.
        length = jnp.maximum(live, self._shortest(jnp, n))
        if self.variant == "kvpress":
            count = self._kvpress(n[None], self._floored_off(live, n)[None], length[None], scores.shape[0])
        else:
            count = self._paper(jnp, n[None], length[None], scores.shape[0])
        return jnp.broadcast_to(count[..., None], scores.shape[:3])

    def fewest(self, n: int, tokens: int) -> int:
        """Count the slots of the layer with fewest, of a prompt of `tokens` tokens."""
        kvpress = self.variant == "kvpress"
        mean = n if kvpress else max(n - self.window, 0)
        low = 2 * mean - min(2 * mean - mean / self.beta, tokens - self.window)
        if kvpress:
            return int(low) if self.window <= low <= mean else n
        return min(n, self.window) + (mean if tokens < 2 * mean else int(low))

    def holding(self, tokens: int) -> Pyramid:
        """Return the pyramid in which every layer keeps at least so many slots."""
        return dataclasses.replace(self, window=max(self.window, tokens))

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        # For a given mean, a layer's count is monotone in the prompt's length (from the mean on), so the
        # largest count is at the shortest or the longest prompt of that mean.
        mean = np.arange(1, n + 1)[None]
        if self.variant == "paper":
            ends = (self._shortest(np, mean), self._longest(mean, tokens))
            rows = [self._paper(np, mean, length, layers) for length in ends]
        else:
            rows = [self._kvpress_most(mean + part, mean, tokens, layers) for part in (0.0, 0.999)]
        return [heads * min(int(x), tokens) for x in np.concatenate(rows, 1).max(1)]

    def layer_rest(self, budget: Budget, tokens: int, layers: int, heads: int) -> list[int]:
        if self.variant != "paper":
            return [heads * (tokens - 1)] * layers
        length, n = lengths_and_means(budget, tokens)
        kept = self._paper(np, n[None], np.maximum(length, self._shortest(np, n))[None], layers)
        return [heads * max(int(x), 0) for x in (length - kept).max(1)]

    def _kvpress_most(self, mean: np.ndarray, n: np.ndarray, tokens: int, layers: int) -> np.ndarray:
        """Find the largest count [L, n] of a layer for each mean, over prompts of at most `tokens` tokens."""
        # The first layer's share, for the shortest and for the longest prompt.
        low, high = (
            np.minimum(2 * mean - mean / self.beta, length - self.window)
            for length in (self._shortest(np, n), tokens)
        )
        # If the first layer's share exceeds `steepest`, the last layer's is less than the window. Then, or if
        # it is less than the mean, all layers keep the mean.
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
        """Find the smallest row length whose budget is n slots; xp is numpy or jax.numpy."""
        ratio = None if self.budget is None else self.budget.ratio
        return n if ratio is None else xp.where(n == 1, n, -(-n * ratio.denominator // ratio.numerator))

    def _longest(self, n: np.ndarray, tokens: int) -> np.ndarray:
        """Find the largest row length, of at most `tokens`, whose budget is n slots."""
        ratio = None if self.budget is None else self.budget.ratio
        if ratio is None:
            return np.full_like(n, tokens)
        return np.minimum(-(-(n + 1) * ratio.denominator // ratio.numerator) - 1, tokens)

    def _floored_off(self, length: Int[Array, "B"], n: Int[Array, "B"]) -> Float[Array, "B"]:
        """Compute the fraction lost when ratio * length was rounded down to n; 0 if n is not that product."""
        ratio = None if self.budget is None else self.budget.ratio
        if ratio is None:
            return jnp.zeros(n.shape, jnp.float32)
        whole, rest = jnp.divmod(length * ratio.numerator, ratio.denominator)
        return jnp.where(whole == n, rest.astype(jnp.float32) / ratio.denominator, 0.0)

    def _paper(self, xp: ModuleType, n: Counts, length: Counts, layers: int) -> Counts:
        """Compute the counts [L, B] with the array module xp; n and length are integers [1, B]."""
        depth = xp.arange(layers, dtype=xp.int32)[:, None].astype(xp.float32)
        whole = xp.maximum(n - self.window, 0).astype(xp.int32)
        spare = whole.astype(xp.float32)
        high = xp.minimum(2 * spare - spare / self.beta, (length - self.window).astype(xp.float32))
        high = xp.where(length < 2 * whole, spare, high)
        low = 2 * spare - high
        share = high - depth * (high - low) / max(layers - 1, 1)
        # Rounding running totals keeps the sum over layers at L * n.
        total = xp.round(xp.cumsum(share, 0)).astype(xp.int32)
        total = xp.concatenate([xp.zeros_like(total[:1]), total[:-1], layers * whole])
        return total[1:] - total[:-1] + xp.minimum(n, self.window).astype(xp.int32)

    def _kvpress(
        self, n: Int[Array, "1 B"], part: Float[Array, "1 B"], length: Int[Array, "1 B"], layers: int
    ) -> Int[Array, "L B"]:
        """Return the counts for the mean n + part.

        Each number is a pair (integer, float) and means their sum: a single float32 would lose the fractions
        that decide rounding from about 10^5 tokens on.
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
    """Round whole + part to the nearest integer, halves to even."""
    base = jnp.floor(part)
    whole, part = whole + base.astype(jnp.int32), part - base
    up = (part > 0.5) | ((part == 0.5) & (whole % 2 == 1))
    return whole + up.astype(jnp.int32)
