"""Neurocache's layers: a cache of compressed hidden states, and attention to the nearest of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.base.ranges import Whole
from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, group_norm, linear
from kvjax.models.mixer import GroupState, Layer, Left, Memory, Mixer, RecurrentState, Take
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.kept_tokens import kept_of, state_of
from kvjax.ops.attention.nearest_states import attend_to_states, nearest_states

# The eps of the LayerNorm, as in the authors' code.
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class HiddenCache(Mixer):
    """Keeps s_t = LayerNorm(x_t W) of every token and retrieves the nearest ones for the layers above.

    Neurocache (Safaya and Yuret, 2024, arXiv:2407.02486), section 3. It adds nothing to the hidden state.
    Gradients through the kept states reach only W and the norm. width: channels of s. window, top,
    neighbours, context: of `kvjax.ops.attention.nearest_states`.
    """

    width: int
    window: int
    top: int = 32
    neighbours: int = 2
    context: int = 2
    grows = frozenset({"states"})
    without_gradient = frozenset({"attn_norm", "attn_post_norm"})
    in_segments = True

    def offers(self, config: Config) -> frozenset[str]:
        return frozenset({"retrieved"})

    axes = {"compress": ("embed", None)}

    def shapes(self, config: Config) -> Shapes:
        norm = {"compress_norm": (self.width,), "compress_norm_bias": (self.width,)}
        return {"compress": (config.d_model, self.width)} | norm

    state_axes = {"states": (), "count": ()}

    def state(self, config: Config) -> Shapes:
        return {"states": (0, self.width), "count": ()}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        states = linear(p, "compress", jax.lax.stop_gradient(x))
        states = group_norm(p, "compress_norm", states, 1, EPS)

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            index, slots = nearest_states(
                states, window=self.window, top=self.top, neighbours=self.neighbours, context=self.context,
                mask=mask, segments=memory.segments, **kept_of(past, ("states",)),
            )  # fmt: skip
            retrieved.append((slots.kept["states"], index))
            # A token without a slot has no valid output.
            lost = (slots.count > slots.capacity)[:, None, None]
            return jnp.where(lost, jnp.nan, jnp.zeros_like(x)), state_of(slots, {"states": x.dtype})

        retrieved: list[tuple[Array, Array]] = []
        out, state, left = memory.recur(layer, step, state)
        if "retrieved" in layer.publishes:
            left = left | {"retrieved": retrieved[0]}
        return out, state, left


@dataclasses.dataclass(frozen=True)
class CacheAttention(Attention):
    """Attention, and beside it attention to the states that the `HiddenCache` of layer `cache` retrieved.

    Neurocache (arXiv:2407.02486), section 3: y + softmax(q k' / sqrt(H)) v W_o' with the layer's input for q
    and the retrieved states for k and v, by projections of its own, without rotation. width: channels of a
    state.
    """

    cache: Whole = 0
    width: int = 1

    @property
    def takes(self) -> dict[str, Take]:
        return super().takes | {"retrieved": Take("retrieved", self.cache)}

    def check_takes(self, config: Config, layer: int) -> None:
        super().check_takes(config, layer)
        below = config.mixers[self.cache]
        if self.cache >= layer or not isinstance(below, HiddenCache) or below.width != self.width:
            raise ValueError(
                f"layer {layer} attends to states of width {self.width} of layer {self.cache}, expected a "
                f"HiddenCache of that width below it, got {below!r}"
            )

    axes = Attention.axes | {
        "cache_q": ("embed", "heads"),
        "cache_o": ("heads", "embed"),
        "cache_k": (None, "kv_heads"),
        "cache_v": (None, "kv_heads"),
    }

    def shapes(self, config: Config) -> Shapes:
        d, (heads, kv_heads) = config.d_model, self.count(config)
        n, k = heads * self.channels(config), kv_heads * self.channels(config)
        own: Shapes = {"cache_q": (d, n), "cache_o": (n, d)}
        return super().shapes(config) | own | {f"cache_{x}": (self.width, k) for x in "kv"}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        near, state, left = super().__call__(p, x, layer, memory, state)
        states, index = layer.taken["retrieved"]
        h = self.channels(layer.config)
        q = linear(p, "cache_q", x).reshape(*x.shape[:2], -1, h)
        k, v = (p[f"cache_{n}"].reshape(self.width, -1, h) for n in "kv")
        out = attend_to_states(q, states, index, k, v, scale=layer.scale)
        return near + linear(p, "cache_o", out.reshape(*x.shape[:2], -1)), state, left
