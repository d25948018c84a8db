"""Attention with the weights of another layer: only values are computed and stored."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.base.ranges import Whole
from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, linear
from kvjax.models.mixer import GroupState, Layer, Left, Memory, Mixer, Projected, SlotShape, Take
from kvjax.models.mixers.attention import mixer_of
from kvjax.ops.base.rope import Rope


@dataclasses.dataclass(frozen=True)
class SharedWeights(Mixer):
    """Own values with the attention weights of layer `weights_source`: SA and LISA.

    Unchanged weights give Shared Attention (Beyond KV Caching, arXiv:2407.12866): the layer stores only
    values. With `hidden`, a feed-forward over the heads of every logit aligns them, and with `rank` a product
    of narrow queries and keys, rotated like others, is added (LISA, Cross-layer Attention Sharing,
    arXiv:2408.01890):

        s_l = W_2 silu(W_1 s_source) + q_r k_r' / sqrt(rank)

    The layer then stores values and `rank` channels per KV head. The source may be such a layer itself. The
    text of LISA was not at hand: that its feed-forward works on logits, with this activation and no residual,
    is our reading of its abstract.

    Maps of logits [B, N, T, S] are passed from layer to layer, so a prefill holds those of its whole length.
    """

    weights_source: Whole
    hidden: Whole = 0
    rank: Whole = 0

    def check(self, config: Config) -> None:
        if not 0 <= self.weights_source < config.layers:
            raise ValueError(
                f"weights_source={self.weights_source} names no layer of 0 to {config.layers - 1}"
            )
        if self.hidden < 0 or self.rank < 0 or self.rank % 2:
            raise ValueError(
                f"hidden and rank must be >= 0, and rank even: channels turn in pairs; "
                f"got hidden={self.hidden}, rank={self.rank}"
            )
        if "logits" not in mixer_of(config, self.weights_source).offers(config):
            raise ValueError(
                f"layer {self.weights_source} has no attention weights to share: it keeps a state, or gives "
                "attention to a sink or bias outside the sequence"
            )

    @property
    def takes(self) -> dict[str, Take]:
        return {"logits": Take("logits", self.weights_source)}

    axes = {
        "v": ("embed", "kv_heads"),
        "k_low": ("embed", "kv_heads"),
        "o": ("heads", "embed"),
        "align_up": (None, None),
        "align_down": (None, None),
        "q_low": ("embed", "heads"),
    }

    def shapes(self, config: Config) -> Shapes:
        d, n, k, h = config.d_model, config.heads, config.kv_heads, config.head_dim
        shapes: Shapes = {"v": (d, k * h), "o": (n * h, d)}
        if config.qkv_bias:
            shapes["v_bias"] = (k * h,)
        if config.o_bias:
            shapes["o_bias"] = (d,)
        if self.hidden:
            shapes |= {"align_up": (n, self.hidden), "align_down": (self.hidden, n)}
        if self.rank:
            shapes |= {"q_low": (d, n * self.rank), "k_low": (d, k * self.rank)}
        return shapes

    def slots(self, config: Config) -> SlotShape:
        h = config.head_dim
        return SlotShape(config.kv_heads, h + self.rank, h, config.scale, shared=True, factors=True)

    def rope(self, config: Config, layer: int) -> Rope:
        if not self.rank:
            return Rope(kind="none")
        turning = config.layer_rope(layer)
        return dataclasses.replace(turning, rotary_dim=self.rank, start=config.head_dim)

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        config = layer.config
        b, t, _ = x.shape

        def heads(y: Float[Array, "B T F"], n: int) -> Float[Array, "B n T H"]:
            return jnp.swapaxes(y.reshape(b, t, n, -1), 1, 2)

        # A query is multiplied only with the narrow channels after the values.
        q, stored = (
            jnp.zeros((b, config.heads, t, config.head_dim), x.dtype),
            heads(linear(p, "v", x), config.kv_heads),
        )
        if self.rank:
            q = jnp.concatenate([q, heads(x @ p["q_low"], config.heads)], -1)
            stored = jnp.concatenate([stored, heads(x @ p["k_low"], config.kv_heads)], -1)

        def rescore(
            shown: Float[Array, "B N T S"], q: Float[Array, "B N T F"], k: Float[Array, "B K S F"]
        ) -> Float[Array, "B N T S"]:
            if self.hidden:
                up, down = (p[name].astype(shown.dtype) for name in ("align_up", "align_down"))
                wide = jax.nn.silu(jnp.einsum("bnts,nm->bmts", shown, up))
                shown = jnp.einsum("bmts,mn->bnts", wide, down)
            if self.rank:
                k = jnp.repeat(k[..., config.head_dim :], config.heads // config.kv_heads, axis=1)
                products = jnp.einsum(
                    "bntr,bnsr->bnts", q[..., config.head_dim :], k, preferred_element_type=shown.dtype
                )
                shown = shown + products * self.rank**-0.5
            return shown

        projected = Projected(q, stored, None, x, rescore=rescore)
        out, state, left = memory.attend(layer, projected, state)
        return linear(p, "o", jnp.swapaxes(out, 1, 2).reshape(b, t, -1)), state, left
