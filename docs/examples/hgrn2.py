"""HGRN2's layer, the example of docs/how-to/own-architecture.md."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, linear
from kvjax.models.mixer import GroupState, Layer, Left, Memory, RecurrentState
from kvjax.models.mixers.recurrent import Recurrent
from kvjax.ops.recurrent.linear_attention import hgrn2


@dataclasses.dataclass(frozen=True)
class Hgrn2(Recurrent):
    """HGRN2 (Qin et al., 2024, arXiv:2404.07904): decay a = lb + (1 - lb) sigmoid(x W), key 1 - a."""

    lower_bound: float = 0.1
    in_place = frozenset({"S"})
    axes = Recurrent.axes | {"forget": ("embed", "kv_heads")}

    def shapes(self, config: Config) -> Shapes:
        shapes = super().shapes(config)
        return shapes | {"forget": shapes.pop("k")}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        q, f, v = self.split(*(linear(p, name, x) for name in ("q", "forget", "v")))
        low = jnp.full((self.heads, self.key_dim), self.lower_bound)

        def step(past: RecurrentState | None, mask: Array) -> tuple[Array, RecurrentState]:
            start = None if past is None else past["S"]
            out, new = hgrn2(q, f, v, low, mask=mask, initial_state=start)
            return out, {"S": new}

        out, state, left = memory.recur(layer, step, state)
        return linear(p, "o", self.joined(p, out, layer.config, x)), state, left
