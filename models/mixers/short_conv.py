"""Gated short convolutions, which keep only the last few inputs (LFM2)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, linear
from kvjax.models.mixer import GroupState, Layer, Left, Memory, Mixer, RecurrentState
from kvjax.models.mixers.recurrent import convolved


@dataclasses.dataclass(frozen=True)
class ShortConv(Mixer):
    """LFM2's layer (arXiv:2511.23404): y = (c * conv(b * x)) W_o with b, c, x = split(u W).

    conv: taps of the causal depthwise convolution. bias: whether both maps and the convolution have one.
    """

    conv: int = 3
    bias: bool = False
    in_segments = True

    axes = {"bcx": ("embed", None), "conv": (None, None), "conv_bias": (None,), "o": (None, "embed")}

    def check(self, config: Config) -> None:
        if self.conv < 1:
            raise ValueError(f"conv={self.conv} holds no token, expected at least 1")

    def shapes(self, config: Config) -> Shapes:
        d = config.d_model
        shapes: Shapes = {"bcx": (d, 3 * d), "conv": (self.conv, d), "o": (d, d)}
        return shapes | ({"bcx_bias": (3 * d,), "conv_bias": (d,), "o_bias": (d,)} if self.bias else {})

    state_axes = {"tail": ()}

    def state(self, config: Config) -> Shapes:
        return {"tail": (self.conv, config.d_model)}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        b, c, y = jnp.split(linear(p, "bcx", x), 3, axis=-1)

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            out, tail = convolved(b * y, p["conv"], p.get("conv_bias"), memory, past, mask, active=False)
            return out, {"tail": tail}

        out, state, left = memory.recur(layer, step, state)
        return linear(p, "o", c * out), state, left
