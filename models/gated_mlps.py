"""Gated MLPs with sparse gates, and with multipliers."""

from __future__ import annotations

import dataclasses
import statistics

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.models.config import Config
from kvjax.models.feed_forward import GatedMLP
from kvjax.models.layers import Params
from kvjax.ops.base.dtypes import wide


@dataclasses.dataclass(frozen=True)
class SparseMLP(GatedMLP):
    """A gated MLP whose gate g loses about the share `sparsity` of its channels (Gemma 3n).

    down(act(relu(g - mean(g) - z std(g))) * (x up)), z being the normal quantile of `sparsity` (as in the
    statistical top-k of Spark Transformer, arXiv:2506.06644).
    """

    sparsity: float = 0.95

    def check(self, config: Config) -> None:
        if not 0 < self.sparsity < 1:
            raise ValueError(f"sparsity must be above 0 and below 1, got {self.sparsity}")

    def gated(self, gate: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
        g = gate.astype(wide(gate))
        z = statistics.NormalDist().inv_cdf(self.sparsity)
        cut = g.mean(-1, keepdims=True) + z * g.std(-1, keepdims=True)
        return jax.nn.relu(g - cut).astype(gate.dtype)


@dataclasses.dataclass(frozen=True)
class ScaledMLP(GatedMLP):
    """A gated MLP with factors on its gate and on its output, down(act(a x gate) * (x up)) b (Falcon-H1)."""

    gate_scale: float = 1.0
    out_scale: float = 1.0

    def __call__(self, p: Params, x: Float[Array, "B T D"], config: Config) -> Float[Array, "B T D"]:
        out = super().__call__(p, x, config)
        return out * jnp.asarray(self.out_scale, out.dtype)

    def gated(self, gate: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
        return gate * jnp.asarray(self.gate_scale, gate.dtype)
