"""Budget: how a mean number of slots is shared between heads and layers."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.keep.select import ranks


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Every head of every layer keeps n slots."""

    uniform = True

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

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        layers, b, k, s = scores.shape
        flat = jnp.moveaxis(scores, 1, 0).reshape(b, layers * k * s)
        best = (ranks(flat) < (layers * k * n)[:, None]) & (flat > -jnp.inf)
        return jnp.moveaxis(best.reshape(b, layers, k, s), 0, 1).sum(-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Pyramid:
    """PyramidKV (arXiv:2406.02069): counts fall linearly from the first to the last layer, mean n.

    The last layer gets window + (n - window) / beta, the first as much above the mean as the last lies
    below it, and no layer less than `window`.
    """

    beta: float = 20.0
    window: int = 0
    uniform = False

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        layers = scores.shape[0]
        spare = jnp.maximum(n - self.window, 0).astype(jnp.float32)[None]
        low = spare / self.beta
        step = (2 * spare - 2 * low) / max(layers - 1, 1)
        share = 2 * spare - low - step * jnp.arange(layers, dtype=jnp.float32)[:, None]
        share = jnp.where(layers == 1, spare, share)
        # Rounded running totals keep the stack's total at L * n.
        total = jnp.round(jnp.cumsum(share, 0)).astype(jnp.int32)
        count = jnp.diff(total, axis=0, prepend=jnp.zeros_like(total[:1])) + jnp.minimum(n, self.window)[None]
        return jnp.broadcast_to(count[..., None], scores.shape[:3])
