"""Attention whose cache holds the layer's input, from which keys and values are computed again."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.models.config import Config
from kvjax.models.expand import Expand
from kvjax.models.layers import Params, Shapes, linear
from kvjax.models.mixer import GroupState, Layer, Left, Memory, Mixer, Projected, SlotShape
from kvjax.models.mixers.attention import ATTENTION
from kvjax.models.mixers.key_as_value import rope_of, rotated


@dataclasses.dataclass(frozen=True)
class LayerInputs(Mixer):
    """Plain attention that stores x instead of keys and values (XQuant, arXiv:2508.10395, section 3).

        k = RoPE(x W_k), v = x W_v

    The cache holds the layer's normalised input, one row of D channels per token for all heads, and computes
    keys and values from it in prefills and in steps; keys are rotated by the positions of their slots. The
    parameters are those of `Attention`. Methods that compare stored keys in steps or rotate them by rank do
    not fit; a rotation that depends on the text's length is refused.
    """

    axes = ATTENTION.axes

    def check(self, config: Config) -> None:
        if kinds := {r.kind for r in (config.rope, config.rope_local) if r and r.by_length}:
            raise ValueError(
                f"LayerInputs turns keys by position and cannot follow a rope of kind {min(kinds)!r}"
            )

    def shapes(self, config: Config) -> Shapes:
        return ATTENTION.shapes(config)

    def slots(self, config: Config) -> SlotShape:
        scale = ATTENTION.slots_of(config).scale
        return SlotShape(1, config.d_model, config.d_model, scale, shared=True, factors=True, expands=True)

    def met(
        self, p: Params, config: Config, window: int | None, k: Array, v: Array, pos: Int[Array, "B 1 S"]
    ) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
        k, v = _computed(p, config, k, v)
        return rotated(rope_of(config, window), k, pos), v

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        config, rotate = layer.config, partial(rotated, rope_of(layer.config, layer.window))
        asked = rotate(ATTENTION.project(p, x, config).q, layer.pos[:, None])
        expand = Expand(lambda rotated: rotated, partial(_computed, p, config), None, rotate=rotate)
        projected = Projected(asked, x[:, None], None, x, expand=expand)
        out, state, left = memory.attend(layer, projected, state)
        return linear(p, "o", jnp.swapaxes(out, 1, 2).reshape(*x.shape[:2], -1)), state, left


def _computed(
    p: Params, config: Config, k: Float[Array, "B 1 S D"], v: Array
) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """Unrotated keys, and values, of stored inputs."""
    found = ATTENTION.project(p, k[:, 0], config)
    assert found.k is not None and found.v is not None
    return found.k, found.v
