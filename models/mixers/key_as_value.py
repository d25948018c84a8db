"""Attention whose keys and values are one projection, of which the cache holds a single array."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.models.config import Config
from kvjax.models.expand import Expand
from kvjax.models.layers import Params, Shapes, last_axis, linear, linear_to_heads, rms_norm
from kvjax.models.mixer import GroupState, Layer, Left, Memory, Mixer, Projected, SlotShape
from kvjax.models.mixers.attention import Even
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.rope import Rope, angles, rotate


@dataclasses.dataclass(frozen=True)
class KeyAsValue(Mixer):
    """Gemma 4's full layers without a value projection (`attention_k_eq_v`).

        v = RMSNorm(x W_k) over each head, k = RoPE(v * w_k)

    The cache holds v alone, half of what keys and values take. Keys are computed from it, and rotated by the
    positions of their slots, in prefills and in steps. heads are the config's; kv_heads, head_dim: as of
    `Attention`. Methods that compare stored keys in steps or rotate them by rank do not fit; a rotation that
    depends on the text's length is refused.
    """

    kv_heads: int | None = None
    head_dim: Even | None = None

    def check(self, config: Config) -> None:
        if self._lists(config) < 1 or config.heads % self._lists(config):
            raise ValueError(f"{config.heads} query heads cannot share {self._lists(config)} KV heads evenly")
        if kinds := {r.kind for r in (config.rope, config.rope_local) if r and r.by_length}:
            raise ValueError(
                f"KeyAsValue turns keys by position and cannot follow a rope of kind {min(kinds)!r}"
            )
        if config.qk_norm != "head" or config.qkv_bias:
            raise ValueError("KeyAsValue needs qk_norm='head', and no bias of keys that are values too")

    def _lists(self, config: Config) -> int:
        return self.kv_heads or config.kv_heads

    def channels(self, config: Config) -> int:
        """Of every head."""
        return self.head_dim or config.head_dim

    axes = {"q": ("embed", "heads"), "k": ("embed", "kv_heads"), "o": ("heads", "embed")}

    def shapes(self, config: Config) -> Shapes:
        d, h = config.d_model, self.channels(config)
        n, k = config.heads * h, self._lists(config) * h
        shapes: Shapes = {"q": (d, n), "k": (d, k), "o": (n, d), "q_norm": (h,), "k_norm": (h,)}
        return shapes | ({"o_bias": (d,)} if config.o_bias else {})

    def slots(self, config: Config) -> SlotShape:
        h = self.channels(config)
        scale = h**-0.5 if config.query_scale is None else config.query_scale
        return SlotShape(self._lists(config), h, h, scale, shared=True, factors=True, expands=True)

    def met(
        self, p: Params, config: Config, window: int | None, k: Array, v: Array, pos: Int[Array, "B K S"]
    ) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
        k, v = _keys(p, config, k, v)
        return rotated(rope_of(config, window), k, pos), v

    def met_heads(self, config: Config) -> int:
        return self._lists(config)

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        config, rotate = layer.config, partial(rotated, rope_of(layer.config, layer.window))
        b, t, _ = x.shape

        def heads(name: str, weight: Array | None) -> Float[Array, "B X T H"]:
            y = linear_to_heads(p, name, x).reshape(b, t, -1, self.channels(config))
            return rms_norm(jnp.swapaxes(y, 1, 2), weight, config.norm_eps, config.norm_offset)

        asked = rotate(heads("q", p["q_norm"]), layer.pos[:, None])
        expand = Expand(lambda rotated: rotated, partial(_keys, p, config), None, rotate=rotate)
        projected = Projected(asked, heads("k", None), None, x, expand=expand)
        out, state, left = memory.attend(layer, projected, state)
        return linear(p, "o", jnp.swapaxes(out, 1, 2).reshape(b, t, -1)), state, left


def rope_of(config: Config, window: int | None) -> Rope:
    return config.rope if window is None else config.rope_local or config.rope


def _keys(
    p: Params, config: Config, k: Float[Array, "B K S H"], v: Array
) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """Unrotated keys, and values, computed from the stored ones."""
    y = k.astype(wide(k))
    return (y * last_axis(config.norm_offset + p["k_norm"].astype(y.dtype), y)).astype(k.dtype), k


def rotated(rope: Rope, x: Float[Array, "B X S H"], pos: Int[Array, "B #X S"]) -> Float[Array, "B X S H"]:
    """Rotate x by positions, which no length of a row changes."""
    return rotate(x, *angles(rope, pos, x.shape[-1], dtype=wide(x)), rope.start)
