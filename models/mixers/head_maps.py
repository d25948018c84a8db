"""Attention whose query, key and value heads are paired by index maps instead of equal groups."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.base.ranges import Whole
from kvjax.models.config import Config
from kvjax.models.expand import Expand
from kvjax.models.layers import Params, Shapes, linear, rms_norm
from kvjax.models.mixer import GroupState, Layer, Left, Memory, Mixer, Projected, SlotShape
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.rope import angles, rotate


@dataclasses.dataclass(frozen=True)
class HeadMaps(Mixer):
    """Head i attends with query head q_of[i], key head k_of[i] and value head v_of[i].

    Unequal groups are k_of = v_of: AsymGQA, QCQA (arXiv:2406.10247) and key-driven GQA (arXiv:2408.08454),
    whose searches give such maps. DHA (arXiv:2406.06567) has two different ones. GQKVA (arXiv:2311.03426)
    pairs every query group with every key and value group, so that q_of repeats too.

    Biases and norms per head are those of the config; a norm over all heads together (qk_norm="full") is
    refused, because it would depend on how many there are, and so is dynamic rotation.

    All heads of a token share one slot, so methods that choose tokens per KV head, or score stored keys, do
    not fit. Keys are stored rotated.
    """

    q_of: tuple[Whole, ...]
    k_of: tuple[Whole, ...]
    v_of: tuple[Whole, ...]

    def check(self, config: Config) -> None:
        if config.qk_norm == "full":
            raise ValueError('HeadMaps takes qk_norm="" or "head", got "full", which spans all heads')
        if kinds := {r.kind for r in (config.rope, config.rope_local) if r and r.by_length}:
            raise ValueError(f"HeadMaps stores rotated keys and cannot follow a rope of kind {min(kinds)!r}")
        maps = {name: getattr(self, name) for name in ("q_of", "k_of", "v_of")}
        if len({len(m) for m in maps.values()}) != 1:
            raise ValueError(f"the maps must name as many heads each, got {[len(m) for m in maps.values()]}")
        for name, m in maps.items():
            if not m or sorted(set(m)) != list(range(max(m) + 1)):
                raise ValueError(f"{name}={m} must use every head from 0 on, and no others")

    def _count(self, name: str) -> int:
        return max(getattr(self, f"{name}_of")) + 1

    axes = {**dict.fromkeys(("q", "k", "v"), ("embed", None)), "o": (None, "embed")}

    def shapes(self, config: Config) -> Shapes:
        d, h = config.d_model, config.head_dim
        shapes: Shapes = {x: (d, self._count(x) * h) for x in "qkv"} | {"o": (len(self.q_of) * h, d)}
        if config.qk_norm:
            shapes |= {"q_norm": (h,), "k_norm": (h,)}
        if config.qkv_bias:
            shapes |= {f"{x}_bias": (self._count(x) * h,) for x in "qkv"}
        return shapes | ({"o_bias": (d,)} if config.o_bias else {})

    def slots(self, config: Config) -> SlotShape:
        keys, values = (self._count(x) * config.head_dim for x in "kv")
        return SlotShape(1, keys, values, config.scale, factors=True)

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        config = layer.config
        b, t, _ = x.shape
        rope = config.rope if layer.window is None else config.rope_local or config.rope
        cos, sin = angles(rope, memory.pos[..., None], config.head_dim, dtype=wide(x))

        def rotated(name: str) -> Float[Array, "B T _ H"]:
            heads = linear(p, name, x).reshape(b, t, -1, config.head_dim)
            if config.qk_norm:
                heads = rms_norm(heads, p[f"{name}_norm"], config.norm_eps, config.norm_offset)
            return rotate(heads, cos, sin, rope.start)

        q, k = rotated("q"), rotated("k")

        def chosen(stored: Float[Array, "B 1 S F"], heads: tuple[int, ...]) -> Float[Array, "B N S H"]:
            split = stored[:, 0].reshape(*stored.shape[:1], stored.shape[2], -1, config.head_dim)
            return jnp.swapaxes(split[:, :, np.array(heads)], 1, 2)

        def keys(k: Array, v: Array) -> tuple[Array, Array]:
            return chosen(k, self.k_of), chosen(v, self.v_of)

        asked = jnp.swapaxes(q[:, :, np.array(self.q_of)], 1, 2)
        stored = k.reshape(b, 1, t, -1)
        expand = Expand(lambda rotated: rotated, keys, None)
        projected = Projected(asked, stored, linear(p, "v", x)[:, None], x, expand=expand)
        out, state, left = memory.attend(layer, projected, state)
        return linear(p, "o", jnp.swapaxes(out, 1, 2).reshape(b, t, -1)), state, left
