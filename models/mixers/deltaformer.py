"""DeltaFormer's layer: attention over values from which what the memory predicts is subtracted."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, linear
from kvjax.models.mixer import GroupState, Layer, Left, Memory, RecurrentState
from kvjax.models.mixers.kept_tokens import KeptTokens, kept_of, rotated, state_of
from kvjax.ops.attention.deltaformer import deltaformer


@dataclasses.dataclass(frozen=True)
class DeltaFormer(KeptTokens):
    """DeltaFormer's layer (Zhong et al., 2025, arXiv:2505.19488), rotated queries and keys.

    u_t = v_t - beta_t sum_{s < t} p_ts u_s with p_t the softmax of k_t k_s / sqrt(K), beta = x W_b + b_b per
    head, and o_t = softmax_{s <= t}(q_t k_s / sqrt(K)) u. It keeps k and u. Deviation: the text of the paper
    was not at hand; keys that read keys, and the gate, are those of flash-linear-attention's layer.
    """

    in_segments = True

    def check(self, config: Config) -> None:
        if self.groups not in (None, self.heads):
            raise ValueError(f"every head solves a system of its own: leave groups out, got {self.groups}")

    axes = KeptTokens.axes | {"beta": ("embed", "heads")}

    def shapes(self, config: Config) -> Shapes:
        return super().shapes(config) | {"beta": (config.d_model, self.heads), "beta_bias": (self.heads,)}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        q, k, v = self.projected(p, x)
        q, k = (rotated(layer.config, y, memory.pos) for y in (q, k))
        beta = linear(p, "beta", x).astype(jnp.float32)

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            held = None if past is None else past | {"u": past["v"]}
            out, new = deltaformer(
                q, k, v, beta, r=k, mask=mask, segments=memory.segments, **kept_of(held, ("k", "u"))
            )
            left = state_of(new, {"k": x.dtype, "u": x.dtype})
            return out, {"k": left["k"], "v": left["u"], "count": left["count"]}

        out, state, left = memory.recur(layer, step, state)
        return self.out(p, out, x), state, left
