"""Cross-attention over the hidden states of a context, which are stored once for all layers."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.base.ranges import Whole
from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, linear
from kvjax.models.mixer import GroupState, Layer, LayerSlots, Left, Memory, Mixer, SlotShape, Take
from kvjax.ops.attention.strips import attend_to_all
from kvjax.ops.attention.union import Keys
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.rope import angles, rotate


@dataclasses.dataclass(frozen=True)
class CrossAttention(Mixer):
    """Queries from x, keys and values from the states e of a context: k = e W_k, v = e W_v, no bias.

    XC-Cache (Monteiro et al., 2024, arXiv:2404.15420) and CEPE (Yen et al., 2024, arXiv:2402.16617). The
    cache holds e, `width` numbers per context token, once for all layers: this layer holds it, or reads that
    of the layer `source` below. Tokens of the decoder add nothing to it, each of them sees the whole context,
    and without a context the output is zero.

    kv_heads: heads of keys and values (None: the config's). turns: whether queries are rotated by their own
    positions and keys by those of the context, each counted from 0, as in XC-Cache's code for Llama; CEPE's
    code rotates neither. The texts of the papers were not at hand: this follows the authors' code, with
    RMSNorm where XC-Cache's new layers have LayerNorm, and with separate weights per layer, which that code
    shares by default.
    """

    width: int
    source: Whole | None = None
    kv_heads: int | None = None
    turns: bool = False

    def check(self, config: Config) -> None:
        if config.heads % (self.kv_heads or config.kv_heads):
            raise ValueError(f"{config.heads} query heads cannot share {self.kv_heads} KV heads evenly")
        if self.source is not None and not 0 <= self.source < config.layers:
            raise ValueError(f"source={self.source} names no layer of 0 to {config.layers - 1}")
        for layer, mixer in enumerate(config.mixers):
            if mixer == self and config.window(layer) is not None:
                raise ValueError(f"layer {layer} has a window, expected none: a context is seen whole")
            if mixer == self and self.source is not None and self.source > layer:
                raise ValueError(
                    f"layer {layer} reads the context of layer {self.source}, expected one below"
                )

    @property
    def takes(self) -> dict[str, Take]:
        return {} if self.source is None else {"slots": Take("slots", self.source)}

    def offers(self, config: Config) -> frozenset[str]:
        return super().offers(config) - {"logits"}

    axes = {
        "q": ("embed", "heads"),
        "k": ("embed", "kv_heads"),
        "v": ("embed", "kv_heads"),
        "o": ("heads", "embed"),
    }

    def shapes(self, config: Config) -> Shapes:
        d, n = config.d_model, config.heads * config.head_dim
        kv = (self.width, (self.kv_heads or config.kv_heads) * config.head_dim)
        return {"q": (d, n), "k": kv, "v": kv, "o": (n, d)}

    def slots(self, config: Config) -> SlotShape:
        return SlotShape(1, self.width, self.width, config.scale, shared=True, factors=True, fixed=True)

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        config = layer.config
        q = self._heads(linear(p, "q", x), memory.pos, config)
        sets = [self._keys(p, held, config) for held in memory.held(layer, state)]
        left: Left = {"slots": LayerSlots(state)} if "slots" in layer.publishes else {}
        if not sets:
            return jnp.zeros_like(x), state, left
        out = attend_to_all(q, sets, memory.pos, scale=layer.scale)
        return linear(p, "o", jnp.swapaxes(out, 1, 2).reshape(*x.shape[:2], -1)), state, left

    def _keys(self, p: Params, held: Keys, config: Config) -> Keys:
        """Keys and values of stored states."""
        e, pos = held.k[:, 0], held.pos
        assert pos is not None
        k, v = self._heads(e @ p["k"], pos[:, 0], config), self._heads(e @ p["v"], None, config)
        return Keys(k, v, pos)

    def _heads(
        self, x: Float[Array, "B S F"], pos: Int[Array, "B S"] | None, config: Config
    ) -> Float[Array, "B X S H"]:
        """Split a projection into heads, rotated by `pos` if the layer does so."""
        x = x.reshape(*x.shape[:2], -1, config.head_dim)
        if self.turns and pos is not None:
            turn = angles(config.rope, pos[..., None], config.head_dim, dtype=wide(x))
            x = rotate(x, *turn, config.rope.start)
        return jnp.swapaxes(x, 1, 2)
