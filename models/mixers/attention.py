"""Softmax attention with MHA, GQA or MQA heads, rotary positions, QK norms and biases."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.base.ranges import Range, Whole
from kvjax.models.config import Config
from kvjax.models.fingerprint import ADDED
from kvjax.models.layers import Params, Shapes, linear, linear_to_heads, rms_norm, stream_norm
from kvjax.models.mixer import GroupState, Layer, Left, Memory, Mixer, Projected, SlotShape, Take
from kvjax.ops.attention.union import Keys
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.packed_sequences import segment_offsets
from kvjax.ops.base.rope import Rope

Even = Annotated[int, Range(2, even=True)]


@dataclasses.dataclass(frozen=True)
class Attention(Mixer):
    """Attention with the heads, norms and biases of the config.

    heads, kv_heads, head_dim: their numbers in this layer, and the channels of each head, if not the
    config's. value_norm: values are RMSNorm(x W_v) over each head, without a weight (Gemma 4). source: the
    layer whose keys and values are read; this one then has none of its own (CLA, arXiv:2405.12981; MLKV,
    arXiv:2406.09297; YOCO, arXiv:2405.05254; MixAttention, arXiv:2409.15012, whose windowed layers share too;
    LCKV, arXiv:2405.10637, whose source is above). value_source: own keys, but the values of that layer
    (SVFormer, arXiv:2410.17897). value_mix: values are (1 - mix) v + mix v_0 with those of layer 0
    (ResFormer, same paper, 0.5). kv_input: keys and values are projected from the input of that layer, which
    is below (SwiftKV, arXiv:2410.03960) or this one; a prefill then needs only the last token's query here,
    if the layers above need no more.

    unit: queries and keys are RMSNorm over each head, without a weight (Llama 4). chunked: a query sees only
    the tokens of its own chunk, from the last multiple of the layer's window on (Llama 4).

    rotates: whether queries and keys are rotated by their positions (False: NoPE, arXiv:2305.19466, as in
    every fourth layer of SmolLM3). query_growth: (beta, length): queries at position p have the factor 1 +
    beta ln(1 + floor((p + growth_shift) / length)) (Ministral 3; Llama 4, whose shift is 1).

    gate: the heads' outputs are multiplied by sigmoid(x W) before the output map (Gated Attention,
    arXiv:2505.06708; Qwen3-Next). sink: a learned logit per query head that receives attention and has no
    value (GPT-OSS). kv_bias: one learned key and value per KV head that every query sees (Massive
    Activations, arXiv:2402.17762). clip: (gamma, zeta) of the clipped softmax, clip((zeta - gamma) p + gamma,
    0, 1) (Quantizable Transformers, arXiv:2306.12929). out_scale: the factor on the output (Falcon-H1).
    """

    heads: int | None = None
    kv_heads: int | None = None
    source: Whole | None = None
    value_source: Whole | None = None
    value_mix: float | None = None
    kv_input: Whole | None = None
    head_dim: Even | None = dataclasses.field(default=None, metadata=ADDED)
    value_norm: bool = dataclasses.field(default=False, metadata=ADDED)
    unit: bool = dataclasses.field(default=False, metadata=ADDED)
    chunked: bool = dataclasses.field(default=False, metadata=ADDED)
    rotates: bool = dataclasses.field(default=True, metadata=ADDED)
    query_growth: tuple[float, int] | None = dataclasses.field(default=None, metadata=ADDED)
    growth_shift: Whole = dataclasses.field(default=0, metadata=ADDED)
    out_scale: float = dataclasses.field(default=1.0, metadata=ADDED)
    gate: bool = False
    sink: bool = False
    kv_bias: bool = False
    clip: tuple[float, float] | None = None

    def count(self, config: Config) -> tuple[int, int]:
        """Query and KV heads."""
        heads = self.heads or config.heads
        return heads, self.kv_heads or min(heads, config.kv_heads)

    def query_heads(self, config: Config) -> int:
        return self.count(config)[0]

    def channels(self, config: Config) -> int:
        """Of every head."""
        return self.head_dim or config.head_dim

    @property
    def in_segments(self) -> bool | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Chunks are those of a row, so several texts cannot share one."""
        return False if self.chunked else None

    def check(self, config: Config) -> None:
        heads, kv_heads = self.count(config)
        if min(heads, kv_heads) < 1 or heads % kv_heads:
            raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
        for name in ("source", "value_source", "kv_input"):
            at = getattr(self, name)
            if at is not None and not 0 <= at < config.layers:
                raise ValueError(f"{name}={at} names no layer of 0 to {config.layers - 1}")
        if self.source is not None and (self.value_source is not None or self.value_mix is not None):
            raise ValueError("a layer with a source has no values: leave value_source and value_mix out")
        if self.sink and self.kv_bias:
            raise ValueError("sink and kv_bias are two ways to give attention elsewhere: choose one")
        if self.kv_input is not None and (self.source is not None or config.norms == "post"):
            raise ValueError("kv_input needs keys and values of its own, and a norm before attention")
        if self.clip is not None and not (self.clip[0] <= 0 and self.clip[1] >= 1):
            raise ValueError(f"clip=(gamma, zeta) needs gamma <= 0 and zeta >= 1, got {self.clip}")
        if self.query_growth is not None and not self.query_growth[1] >= 1:
            raise ValueError(f"query_growth=(beta, length) needs a length >= 1, got {self.query_growth}")

    def check_takes(self, config: Config, layer: int) -> None:
        super().check_takes(config, layer)
        if self.chunked and config.window(layer) is None:
            raise ValueError(f"layer {layer} is chunked and has no window, which is the size of its chunks")

    @property
    def takes(self) -> dict[str, Take]:
        found = {
            "slots": Take("slots", self.source),
            "slot values": Take("slots", self.value_source),
            "kv input": Take("input", self.kv_input),
            "first values": Take("values", None if self.value_mix is None else 0),
        }
        return {key: take for key, take in found.items() if take.layer is not None}

    def offers(self, config: Config) -> frozenset[str]:
        outside = {"logits"} if self.sink or self.kv_bias else set()
        has_values = self.source is None and self.value_source is None
        return (super().offers(config) | ({"values"} if has_values else set())) - outside

    axes = {
        "q": ("embed", "heads"),
        "attn_gate": ("embed", "heads"),
        "k": ("embed", "kv_heads"),
        "v": ("embed", "kv_heads"),
        "o": ("heads", "embed"),
        "sink_bias": ("heads",),
        "extra_k": ("kv_heads", None),
        "extra_v": ("kv_heads", None),
    }

    def shapes(self, config: Config) -> Shapes:
        d, h = config.d_model, self.channels(config)
        heads, kv_heads = self.count(config)
        n, k = heads * h, kv_heads * h
        shapes: Shapes = {"q": (d, n), "k": (d, k), "v": (d, k), "o": (n, d)}
        absent = "kv" if self.source is not None else "v" if self.value_source is not None else ""
        shapes = {name: shape for name, shape in shapes.items() if name not in absent}
        if self.gate:
            shapes["attn_gate"] = (d, n)
            shapes |= {"attn_gate_bias": (n,)} if config.qkv_bias else {}
        if config.qk_norm:
            head = config.qk_norm == "head"
            shapes |= {f"{x}_norm": (h if head else shapes[x][1],) for x in "qk" if x in shapes}
        if config.qkv_bias:
            shapes |= {f"{x}_bias": (shapes[x][1],) for x in "qkv" if x in shapes}
        if config.o_bias:
            shapes |= {"o_bias": (d,)}
        if self.sink:
            shapes |= {"sink_bias": (heads,)}
        if self.kv_bias:
            shapes |= {"extra_k": (kv_heads, h), "extra_v": (kv_heads, h)}
        return shapes

    def slots(self, config: Config) -> SlotShape:
        own, h = self.value_source is None, self.channels(config)
        scale = h**-0.5 if config.query_scale is None else config.query_scale
        return SlotShape(self.count(config)[1], h, h if own else 0, scale, shared=not own)

    def rope(self, config: Config, layer: int) -> Rope:
        return config.layer_rope(layer) if self.rotates else Rope(kind="none")

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        b, t, _ = x.shape
        below = layer.taken.get("kv input")
        if below is not None:
            below = stream_norm(below, p, "attn_norm", layer.config)
        projected = self.project(p, x, layer.config, below)
        if self.query_growth is not None:
            # Positions of packed texts are apart, so that attention hides them from each other.
            at = layer.pos if memory.segments is None else segment_offsets(memory.segments)
            at = jnp.where(layer.pos >= 0, at + self.growth_shift, 0)
            projected = projected._replace(q=_grown(projected.q, at, *self.query_growth))
        own = projected.v
        if self.value_mix is not None and own is not None:
            first = layer.taken.get("first values", own)
            projected = projected._replace(v=(1 - self.value_mix) * own + self.value_mix * first)
        out, state, left = memory.attend(layer, projected, state)
        if "values" in layer.publishes:
            left = left | {"values": own}
        out = jnp.swapaxes(out, 1, 2).reshape(b, t, -1)
        if self.gate:
            out = out * jax.nn.sigmoid(linear(p, "attn_gate", x))
        out = linear(p, "o", out)
        return out if self.out_scale == 1 else out * jnp.asarray(self.out_scale, out.dtype), state, left

    def project(
        self, p: Params, x: Float[Array, "B T D"], config: Config, below: Float[Array, "B S D"] | None = None
    ) -> Projected:
        """Project queries, keys and values, QK-normalised if the model does so, before rotation.

        below: the input from which keys and values are projected, if it is not x.
        """
        source = x if below is None else below
        q, k, v = (
            self._heads(p, name, y, config) for name, y in zip("qkv", (x, source, source), strict=True)
        )
        if self.unit:
            q, k = (None if y is None else rms_norm(y, None, config.norm_eps) for y in (q, k))
        if self.value_norm and v is not None:
            v = rms_norm(v, None, config.norm_eps)
        assert q is not None
        extra = _sink(p["sink_bias"], x.shape[0], q.shape[-1]) if self.sink else None
        extra = _learned(p, x.shape[0]) if self.kv_bias else extra
        return Projected(q, k, v, x, extra=extra)

    def _heads(
        self, p: Params, name: str, x: Float[Array, "B T D"], config: Config
    ) -> Float[Array, "B X T H"] | None:
        """One projection as heads [B, heads, T, H]; None if the layer has no such projection."""
        if name not in p:
            return None
        y, norm = linear_to_heads(p, name, x), p.get(name + "_norm")
        if norm is not None and config.qk_norm == "full":
            y = rms_norm(y, norm, config.norm_eps, config.norm_offset)
        y = y.reshape(*x.shape[:2], -1, self.channels(config))
        if norm is not None and config.qk_norm == "head":
            y = rms_norm(y, norm, config.norm_eps, config.norm_offset)
        return jnp.swapaxes(y, 1, 2)


def _grown(
    q: Float[Array, "B N T H"], pos: Int[Array, "B T"], beta: float, length: int
) -> Float[Array, "B N T H"]:
    """Multiply queries by 1 + beta ln(1 + floor(pos / length))."""
    turns = (pos // length).astype(wide(q))
    return (q.astype(wide(q)) * (1 + beta * jnp.log1p(turns))[:, None, :, None]).astype(q.dtype)


def _sink(logit: Float[Array, "N"], rows: int, channels: int) -> Keys:
    """One slot per query head with the given logit and value 0."""
    nothing = jnp.zeros((rows, logit.shape[0], 1, channels), logit.dtype)
    bias = jnp.broadcast_to(logit.astype(jnp.float32)[None, :, None], nothing.shape[:3])
    return Keys(nothing, nothing, None, bias)


def _learned(p: Params, rows: int) -> Keys:
    """One learned key and value per KV head."""
    k, v = (
        jnp.broadcast_to(p[n][None, :, None], (rows, p[n].shape[0], 1, p[n].shape[1]))
        for n in ("extra_k", "extra_v")
    )
    return Keys(k, v, None)


ATTENTION = Attention()


def mixer_of(config: Config, layer: int) -> Mixer:
    """Return the mixer of a layer."""
    return config.mixers[layer] if config.mixers else ATTENTION
