"""Gemma 3n: streams, per-layer embeddings, sparse gates, and upper layers that read lower ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.feed_forward import FeedForward, GatedMLP
from kvjax.models.gated_mlps import SparseMLP
from kvjax.models.hf_family import Json, TensorRows
from kvjax.models.hf_mixed.pieces import attention, whole
from kvjax.models.mixer import Mixer
from kvjax.models.mixers.attention import Attention
from kvjax.models.params import layer_shapes
from kvjax.ops.base.rope import Rope


def spell_gemma3n(data: Json) -> dict[str, Any]:
    """One width for all layers, and beside it those of single layers."""
    widths = data.get("intermediate_size")
    layers = data["num_hidden_layers"]
    kinds = data.get("layer_types") or [_kind(i) for i in range(layers)]
    out = {"layer_types": kinds}
    if not isinstance(widths, list | tuple):
        return out
    if len(widths) != layers:
        raise InputError(f"intermediate_size {widths} must be one width, or one for each of {layers} layers")
    return out | {"intermediate_size": widths[0], "layer_widths": [*widths]}


def _kind(layer: int) -> str:
    return "sliding_attention" if (layer + 1) % 5 else "full_attention"


def read_gemma3n(data: Json, rope: Rope) -> dict[str, Any]:
    if data["altup_active_idx"] or not data["altup_correct_scale"]:
        raise InputError("altup_active_idx other than 0 or altup_correct_scale = false is not supported")
    if data["vocab_size_per_layer_input"] > data["vocab_size"]:
        raise InputError(
            f"vocab_size_per_layer_input is {data['vocab_size_per_layer_input']}, expected at most the "
            f"vocab_size of {data['vocab_size']}"
        )
    fewer = data["vocab_size_per_layer_input"] != data["vocab_size"]
    bias = bool(data.get("attention_bias"))
    return {
        "mixers": _mixers(data),
        "mlps": _mlps(data),
        "norms": "both",
        "qk_norm": "head",
        "qkv_bias": bias,
        "o_bias": bias,
        "embed_scale": float(data["hidden_size"]) ** 0.5,
        "query_scale": 1.0,
        "logit_softcap": data.get("final_logit_softcapping"),
        "layer_embeddings": data["hidden_size_per_layer_input"],
        "layer_vocab": data["vocab_size_per_layer_input"] if fewer else 0,
        "streams": data["altup_num_inputs"],
        "laurel": data["laurel_rank"],
    }


def _mixers(data: Json) -> tuple[Mixer, ...]:
    """Attention in every layer; the upper ones read the last layer of their kind that has keys."""
    layers, kinds = data["num_hidden_layers"], [*data["layer_types"]]
    first = layers - data["num_kv_shared_layers"]
    if len(kinds) != layers or {*kinds} - {*kinds[: max(first, 0)]}:
        raise InputError(
            f"layer_types {kinds} and num_kv_shared_layers = {layers - first} leave layers without keys: "
            f"expected {layers} kinds, each of which occurs in the first {max(first, 0)}"
        )
    last = {kind: i for i, kind in enumerate(kinds[:first])}
    own, reads = Attention(value_norm=True), {kind: Attention(source=i) for kind, i in last.items()}
    return (own,) * first + tuple(reads[kind] for kind in kinds[first:])


def _mlps(data: Json) -> tuple[FeedForward, ...]:
    layers, width = data["num_hidden_layers"], data["intermediate_size"]
    pattern = data.get("activation_sparsity_pattern")
    if pattern is None:
        pattern = [0.95 if i < 10 < layers else 0.0 for i in range(layers)]
    pattern = pattern if isinstance(pattern, list | tuple) else [pattern] * layers
    if len(pattern) != layers:
        raise InputError(
            f"activation_sparsity_pattern {pattern} must have a share for each of {layers} layers"
        )
    widths = [None if w == width else w for w in data.get("layer_widths", [width] * layers)]
    pairs = zip(widths, pattern, strict=True)
    return tuple(SparseMLP(w, share) if share else GatedMLP(w) for w, share in pairs)


def write_gemma3n(config: Config) -> dict[str, Any]:
    words = [word for word in config.mlps if isinstance(word, GatedMLP)]
    return {
        "intermediate_size": [word.width or config.d_ff for word in words],
        "activation_sparsity_pattern": [
            word.sparsity if isinstance(word, SparseMLP) else 0.0 for word in words
        ],
        "num_kv_shared_layers": sum("slots" in mixer.takes for mixer in config.mixers),
        "final_logit_softcapping": config.logit_softcap,
        "hidden_size_per_layer_input": config.layer_embeddings,
        "vocab_size_per_layer_input": config.layer_vocab or config.vocab,
        "altup_num_inputs": config.streams,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "laurel_rank": config.laurel,
    }


def gemma3n(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    sizes = layer_shapes(config, layer)
    names = {
        "attn_norm": "input_layernorm.weight",
        "attn_post_norm": "post_attention_layernorm.weight",
        "mlp_norm": "pre_feedforward_layernorm.weight",
        "mlp_post_norm": "post_feedforward_layernorm.weight",
        "gate": "mlp.gate_proj.weight",
        "up": "mlp.up_proj.weight",
        "down": "mlp.down_proj.weight",
        "embed_gate": "per_layer_input_gate.weight",
        "embed_up": "per_layer_projection.weight",
        "embed_post_norm": "post_per_layer_input_norm.weight",
        "laurel_left": "laurel.linear_left.weight",
        "laurel_right": "laurel.linear_right.weight",
        "laurel_post_norm": "laurel.post_laurel_norm.weight",
        "stream_router": "altup.modality_router.weight",
        "stream_router_norm": "altup.router_norm.weight",
        "stream_predict": "altup.prediction_coefs.weight",
        "stream_correct": "altup.correction_coefs.weight",
        "stream_scale": "altup.correct_output_scale",
    }
    for leaf, name in names.items():
        yield name, whole(leaf, sizes[leaf][-1])
    yield from attention(config, layer)
