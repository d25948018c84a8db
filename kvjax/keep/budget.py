"""Budget: how a mean number of slots is shared between heads and layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.keep.select import ranks


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Every head of every layer keeps n slots."""

    uniform = True
    across_layers = False

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * n] * layers

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        return jnp.broadcast_to(n[None, :, None], scores.shape[:3])


@dataclasses.dataclass(frozen=True)
class AcrossHeads:
    """Ada-KV (arXiv:2407.11550): a layer's K * n best slots, wherever they lie, decide the head counts.

    floor is the share of n that every head keeps. blend=True is Algorithm 1's safeguard,
    count = (1 - floor) * flat count + floor * n, rounded so that the layer's total stays; blend=False gives
    every head its best floor * n slots first and fills up from the flat ranking (kvpress).
    """

    floor: float = 0.2
    blend: bool = True
    uniform = False
    across_layers = False

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * n] * layers

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        layers, b, k, s = scores.shape
        safe = (n * round(self.floor * 1000)) // 1000
        if not self.blend:
            scores = jnp.where(ranks(scores) < safe[None, :, None, None], jnp.inf, scores)
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
    """KVzip (arXiv:2505.23416), non-uniform: the L * K * n best slots of the whole stack stay."""

    uniform = False
    across_layers = True

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * n] * layers

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        layers, b, k, s = scores.shape
        flat = jnp.moveaxis(scores, 1, 0).reshape(b, layers * k * s)
        best = (ranks(flat) < (layers * k * n)[:, None]) & (flat > -jnp.inf)
        return jnp.moveaxis(best.reshape(b, layers, k, s), 0, 1).sum(-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Pyramid:
    """PyramidKV (arXiv:2406.02069, section 4.2): counts fall linearly from the first layer to the last.

    "paper": beyond a window that every layer keeps, the last layer gets (n - window) / beta slots and the
    first as much above the mean as the last lies below it, at most what the prompt has; rounded so that the
    stack keeps L * n. "kvpress": the window counts inside the layer's share, each layer is rounded alone, and
    budgets too small for the window are uniform.
    """

    beta: float = 20.0
    window: int = 0
    variant: str = "paper"
    uniform = False
    across_layers = False

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        length = (scores > -jnp.inf).sum(-1).max((0, 2))
        count = self._per_layer(jnp, n[None], length[None], scores.shape[0])
        return jnp.broadcast_to(count[..., None], scores.shape[:3])

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        rows = self._per_layer(np, np.arange(1, n + 1)[None], np.full((1, n), tokens), layers)
        return [heads * int(x) for x in rows.max(1)]

    def _per_layer(self, xp: Any, n: Any, length: Any, layers: int) -> Any:
        """Counts [L, B] with the array module xp; n and length are [1, B]."""
        depth = xp.arange(layers, dtype=xp.float32)[:, None]
        exact, room = n.astype(xp.float32), length.astype(xp.float32) - self.window
        inside = self.variant == "kvpress"
        spare = exact if inside else xp.maximum(exact - self.window, 0)
        high = xp.minimum(2 * spare - spare / self.beta, room)
        low = 2 * spare - high
        share = high - depth * (high - low) / max(layers - 1, 1)
        if inside:
            steep = (length >= high) & (high >= low) & (low >= self.window)
            return xp.where(steep, xp.round(share), exact).astype(xp.int32)
        # Rounded running totals keep the stack's total at L * n.
        total = xp.round(xp.cumsum(share if layers > 1 else spare, 0)).astype(xp.int32)
        count = total - xp.concatenate([xp.zeros_like(total[:1]), total[:-1]])
        return count + xp.minimum(n, self.window).astype(xp.int32)
