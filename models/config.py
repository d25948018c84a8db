"""Sizes and constants of a decoder."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvjax.models.layers import ACTIVATIONS
from kvjax.ops.base.rope import Rope

if TYPE_CHECKING:
    # Both modules import this one.
    from kvjax.models.feed_forward import FeedForward
    from kvjax.models.mixer import Mixer


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and constants of a decoder; names follow the alphabet of `kvjax`.

    windows: per layer, the number of newest tokens a query sees, or None for all. rope_local: the rotation
    of the windowed layers where it differs. norm_offset: RMSNorm multiplies by (offset + weight).
    norms: "pre" (before attention and MLP), "post" (after, OLMo 2) or "both" (Gemma). qk_norm: "" or
    "head" (RMSNorm over H) or "full" (over all heads together). query_scale: logits multiply by this.

    mixers: what mixes the tokens of each layer, words of `kvjax.models.mixers`; empty means attention with
    the heads above in every layer. mlps: the feed-forward of each layer, words of
    `kvjax.models.feed_forward`; empty means the gated MLP of width d_ff. inputs: per layer, a layer
    below whose input its mixer takes instead of its own, so that both stand side by side; or None.

    Raises ValueError where sizes do not go together.
    """

    vocab: int
    d_model: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    rope: Rope = Rope()
    rope_local: Rope | None = None
    windows: tuple[int | None, ...] = ()
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    norms: str = "pre"
    qk_norm: str = ""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    embed_scale: float = 1.0
    query_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    tied: bool = False
    max_positions: int = 8192
    family: str = "llama"
    mixers: tuple[Mixer, ...] = ()
    mlps: tuple[FeedForward, ...] = ()
    inputs: tuple[int | None, ...] = ()

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly")
        for name in ("windows", "mixers", "mlps", "inputs"):
            given = getattr(self, name)
            if given and len(given) != self.layers:
                raise ValueError(f"{name} names {len(given)} layers, the model has {self.layers}")
        if self.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, got {self.head_dim}")
        if not self.norm_eps >= 0:
            raise ValueError(f"norm_eps must be a number >= 0, got {self.norm_eps}")
        if self.norms not in ("pre", "post", "both") or self.qk_norm not in ("", "head", "full"):
            raise ValueError(f"unknown norms={self.norms!r} or qk_norm={self.qk_norm!r}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {sorted(ACTIVATIONS)}, got {self.activation!r}")
        for word in (*self.mixers, *self.mlps):
            word.check(self)
        for i, mixer in enumerate(self.mixers):
            mixer.check_takes(self, i)
            if not mixer.shapes(self) and self.mlps and not self.mlps[i].shapes(self):
                raise ValueError(f"layer {i} has neither a mixer nor a feed-forward: leave it out")
        for i, at in enumerate(self.inputs):
            if at is not None and not 0 <= at < i:
                raise ValueError(f"layer {i} takes the input of layer {at}, expected one below")
            if at is not None and {"slots", "kv input"} & self.mixers[i].takes.keys():
                raise ValueError(f"layer {i} takes the input of layer {at}, and reads another: choose one")

    @property
    def scale(self) -> float:
        """What attention logits multiply by, unless a mixer has a scale of its own."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def layer_rope(self, layer: int) -> Rope:
        return self.rope if self.window(layer) is None or self.rope_local is None else self.rope_local
