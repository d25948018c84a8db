"""Sizes and constants of a decoder."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal

from kvjax.base.ranges import Count, FieldError, Range, Whole, check_fields
from kvjax.models.fingerprint import ADDED
from kvjax.models.layers import ACTIVATIONS
from kvjax.ops.base.rope import Rope

if TYPE_CHECKING:
    # A late import: both modules import this one.
    from kvjax.models.feed_forward import FeedForward
    from kvjax.models.mixer import Mixer
else:
    FeedForward = Mixer = Any

_ONE = Range(1)
_WORDS = {
    "mixers": "a word of kvjax.models.mixers such as Attention()",
    "mlps": "a word of kvjax.models.feed_forward such as MLP()",
}
Positive = Annotated[float, Range(0, above=True)]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and constants of a decoder; names follow the alphabet of `kvjax`.

    windows: per layer, the number of newest tokens a query sees, or None for all. rope_local: the rotation of
    the windowed layers, if it differs. norm_offset: RMSNorm multiplies by (offset + weight). norms: "pre"
    (before attention and MLP), "post" (after, OLMo 2), "both" (Gemma) or "parallel" (one before the two,
    which both add to its input, Cohere). centred: norms of the hidden state subtract its mean first
    (LayerNorm), norm_bias: they have a bias, embed_norm: the embeddings are normalised too (RWKV).
    qk_norm: "" or "head" (RMSNorm over H) or "full" (over all heads together).
    query_scale: the factor on attention logits. residual_scale: the factor on what mixers and feed-forwards
    add to the hidden state, logit_scale: the factor on the last logits (Granite; muP, arXiv:2203.03466).
    layer_embeddings: channels of a vector that every layer has of every token, layer_vocab: how many tokens
    have one (0: all), layer_scales: whether the output of a layer is multiplied by a learned number (Gemma 4;
    `kvjax.models.layer_embeddings`). streams: the parts of a hidden state, of which a layer computes the
    first and predicts the others, laurel: the rank of a map beside attention, 0 for none (Gemma 3n;
    `kvjax.models.streams`).

    mixers: the mixer of each layer, words of `kvjax.models.mixers`; empty means attention with the heads
    above in every layer. mlps: the feed-forward of each layer, words of `kvjax.models.feed_forward`; empty
    means the gated MLP of width d_ff. inputs: per layer, a lower layer whose input its mixer takes instead of
    its own, so that both run in parallel; or None.

    Raises InputError for a value that its field does not allow, ValueError if sizes are inconsistent.
    """

    vocab: Count
    d_model: Count
    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Annotated[int, Range(2, even=True)]
    d_ff: Whole
    rope: Rope = Rope()
    rope_local: Rope | None = None
    windows: tuple[Count | None, ...] = ()
    norm_eps: Annotated[float, Range(0)] = 1e-6
    norm_offset: float = 0.0
    norms: Literal["pre", "post", "both", "parallel"] = "pre"
    centred: bool = dataclasses.field(default=False, metadata=ADDED)
    norm_bias: bool = dataclasses.field(default=False, metadata=ADDED)
    embed_norm: bool = dataclasses.field(default=False, metadata=ADDED)
    qk_norm: Literal["", "head", "full"] = ""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    embed_scale: float = 1.0
    residual_scale: Positive = dataclasses.field(default=1.0, metadata=ADDED)
    logit_scale: Positive = dataclasses.field(default=1.0, metadata=ADDED)
    layer_embeddings: Whole = dataclasses.field(default=0, metadata=ADDED)
    layer_scales: bool = dataclasses.field(default=False, metadata=ADDED)
    layer_vocab: Whole = dataclasses.field(default=0, metadata=ADDED)
    streams: Count = dataclasses.field(default=1, metadata=ADDED)
    laurel: Whole = dataclasses.field(default=0, metadata=ADDED)
    query_scale: Positive | None = None
    attention_softcap: Positive | None = None
    logit_softcap: Positive | None = None
    tied: bool = False
    max_positions: Count = 8192
    family: str = "llama"
    mixers: tuple[Mixer, ...] = ()
    mlps: tuple[FeedForward, ...] = ()
    inputs: tuple[Whole | None, ...] = ()

    def __post_init__(self):
        check_fields(self)
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly")
        if not self.mlps and not self.d_ff:
            raise FieldError(
                "d_ff is 0, expected a width of the feed-forwards of at least 1, or mlps without it"
            )
        for name in ("windows", "mixers", "mlps", "inputs"):
            given = getattr(self, name)
            if given and len(given) != self.layers:
                raise ValueError(f"{name} names {len(given)} layers, the model has {self.layers}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {sorted(ACTIVATIONS)}, got {self.activation!r}")
        for name in ("mixers", "mlps"):
            seen = {id(word): (i, word) for i, word in reversed([*enumerate(getattr(self, name))])}
            for i, word in seen.values():
                if isinstance(word, type) or not hasattr(word, "shapes"):
                    raise FieldError(f"{name}[{i}] is {word!r}, expected {_WORDS[name]}")
                check_fields(word, f"{name}[{i}]: {type(word).__name__}.", whole=_ONE)
                word.check(self)
        for i, mixer in enumerate(self.mixers):
            mixer.check_takes(self, i)
            if self.norms == "parallel" and mixer.absent:
                raise ValueError(f"layer {i} has no mixer, with which its feed-forward would share a norm")
            if mixer.absent and self.mlps and self.mlps[i].absent:
                raise ValueError(f"layer {i} has neither a mixer nor a feed-forward: leave it out")
        if (self.streams > 1 or self.laurel) and (self.inputs or self.norms == "parallel"):
            raise ValueError("streams and laurel are of layers one above the other: leave inputs out")
        for i, at in enumerate(self.inputs):
            if at is not None and not 0 <= at < i:
                raise ValueError(f"layer {i} takes the input of layer {at}, expected one below")
            if at is not None and {"slots", "kv input"} & self.mixers[i].takes.keys():
                raise ValueError(f"layer {i} takes the input of layer {at}, and reads another: choose one")

    @property
    def scale(self) -> float:
        """The factor on attention logits, unless a mixer has its own."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def layer_rope(self, layer: int) -> Rope:
        return self.rope if self.window(layer) is None or self.rope_local is None else self.rope_local
