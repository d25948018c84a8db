"""Dynamic memory compression as a layer: every head appends a token or merges it into its last slot."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes
from kvjax.models.mixer import GroupState, Layer, Left, Memory, RecurrentState
from kvjax.models.mixers.kept_tokens import KeptTokens, rotated
from kvjax.ops.attention.dmc import Merged, dmc


@dataclasses.dataclass(frozen=True)
class DynamicMerging(KeptTokens):
    """Dynamic Memory Compression (Nawrot et al., 2024, arXiv:2403.09636): decisions from k[0], weights q[0].

    merge = sigmoid(k[0] - offset) > 1/2 and weight sigmoid(q[0]), of a KV head's first query head; both
    channels are zeroed then, and the rest is rotated. If a head merges, its last slot becomes the weighted
    mean. Deviations: decisions are hard in training too, so no gradient reaches them, where the paper trains
    relaxed ones with noise and a loss for the rate; and every token has a slot, so that merges do not
    reduce bytes. `count` in the state says how many slots each head uses.
    """

    offset: float = 5.0
    in_segments = True

    state_axes = {"count": (), "weight": ()}

    def state(self, config: Config) -> Shapes:
        heads = (self.key_heads,)
        return super().state(config) | {"count": heads, "weight": heads}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        q, k, v = self.projected(p, x)
        first = q[:, :, :: self.heads // self.key_heads, 0]
        merge, weight = k[..., 0] > self.offset, jax.nn.sigmoid(first.astype(jnp.float32))
        rest = jnp.arange(self.key_dim) > 0
        q, k = (rotated(layer.config, jnp.where(rest, y, 0), memory.pos) for y in (q, k))

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            start, capacity = None, None
            if past is not None:
                opened = jnp.zeros_like(past["count"])
                start = Merged(past["k"], past["v"], past["weight"], opened, past["count"])
                capacity = past["k"].shape[1]
            out, _, new = dmc(
                q,
                k,
                v,
                merge,
                weight,
                initial_state=start,
                capacity=capacity,
                mask=mask,
                segments=memory.segments,
            )
            kept = {"k": new.k.astype(x.dtype), "v": new.v.astype(x.dtype)}
            return out, kept | {"count": new.count, "weight": new.weight}

        out, state, left = memory.recur(layer, step, state)
        return self.out(p, out, x), state, left
