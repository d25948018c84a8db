"""Attention in which every token sees all others of its row: the layers of an encoder."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, linear
from kvjax.models.mixer import GroupState, Layer, Left, Memory, Mixer
from kvjax.models.mixers.attention import ATTENTION, Attention
from kvjax.ops.attention.strips import attend_to_all
from kvjax.ops.attention.union import Keys
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.rope import angles, rotate


@dataclasses.dataclass(frozen=True)
class Bidirectional(Mixer):
    """`Attention()` with the config's heads, norms, biases and rotation, but without the causal mask.

    The layers of CEPE's encoder (arXiv:2402.16617). Later tokens change the representations of earlier ones,
    so nothing can be cached: such a model only runs without a cache, as the encoder of a context.
    """

    def check(self, config: Config) -> None:
        if any(config.window(i) is not None for i, mixer in enumerate(config.mixers) if mixer == self):
            raise ValueError("a layer whose tokens see all others has a window, expected none")

    axes = Attention.axes

    def shapes(self, config: Config) -> Shapes:
        return ATTENTION.shapes(config)

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        config, pos = layer.config, memory.pos
        projected = ATTENTION.project(p, x, config)
        assert projected.k is not None and projected.v is not None
        length = (pos.max(1) + 1)[:, None, None]
        cos, sin = angles(config.rope, pos[:, None], config.head_dim, length, dtype=wide(x))
        q, k = (rotate(y, cos, sin, config.rope.start) for y in (projected.q, projected.k))
        keys = Keys(k, projected.v, pos[:, None])
        out = attend_to_all(q, [keys], pos, scale=config.scale, softcap=config.attention_softcap)
        return linear(p, "o", jnp.swapaxes(out, 1, 2).reshape(*x.shape[:2], -1)), state, {}
