"""LFM2: gated short convolutions, attention in a few layers, and experts or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.feed_forward import GatedMLP, MoE, mlp_of
from kvjax.models.hf_family import Json, TensorRows
from kvjax.models.hf_mixed.pieces import attention, experts, whole
from kvjax.models.mixers.attention import Attention, mixer_of
from kvjax.models.mixers.short_conv import ShortConv
from kvjax.ops.base.rope import Rope


def spell_lfm2(data: Json) -> dict[str, Any]:
    """Spell the width of feed-forwards: two thirds of the given one, times a factor, rounded up."""
    # Published files name it block_ff_dim alone.
    width = data["block_ff_dim" if data.get("block_ff_dim") else "intermediate_size"]
    unit = data["block_multiple_of"]
    if data["block_auto_adjust_ff_dim"]:
        width = int(data["block_ffn_dim_multiplier"] * int(2 * width / 3))
        width = -(-width // unit) * unit
    tied = data.get("tie_embedding", data["tie_word_embeddings"])
    return {"rms_norm_eps": data["norm_eps"], "intermediate_size": width, "tie_word_embeddings": tied}


def spell_lfm2_moe(data: Json) -> dict[str, Any]:
    tied = data.get("tie_embedding", data["tie_word_embeddings"])
    return {"rms_norm_eps": data["norm_eps"], "tie_word_embeddings": tied}


def read_lfm2_moe(data: Json, rope: Rope) -> dict[str, Any]:
    """Chosen weights are divided by their sum; the authors add 1e-6 to it, which is left out here."""
    word = MoE(
        data["num_experts"], data["num_experts_per_tok"], data["moe_intermediate_size"], scores="sigmoid",
        normalise=bool(data["norm_topk_prob"]), scale=float(data["routed_scaling_factor"]),
        biased=None if data["use_expert_bias"] else False,
    )  # fmt: skip
    dense = data["num_dense_layers"]
    mlps = tuple(GatedMLP() if i < dense else word for i in range(data["num_hidden_layers"]))
    return read_lfm2(data, rope) | {"mlps": mlps}


def write_lfm2_moe(config: Config) -> dict[str, Any]:
    words = [word for word in config.mlps if isinstance(word, MoE)]
    first = words[0]
    kinds = write_lfm2(config)
    return {name: kinds[name] for name in ("layer_types", "conv_L_cache", "conv_bias", "norm_eps")} | {
        "num_experts": first.experts,
        "num_experts_per_tok": first.top,
        "moe_intermediate_size": first.width,
        "norm_topk_prob": first.normalise,
        "routed_scaling_factor": first.scale,
        "use_expert_bias": first.has_bias,
        "num_dense_layers": config.layers - len(words),
    }


def read_lfm2(data: Json, rope: Rope) -> dict[str, Any]:
    layers = data["num_hidden_layers"]
    attends = data.get("full_attn_idxs", range(layers))
    kinds = data.get("layer_types") or ["full_attention" if i in attends else "conv" for i in range(layers)]
    if {*kinds} - {"conv", "full_attention"} or len(kinds) != layers:
        raise InputError(f"layer_types {kinds} must name conv or full_attention for each of {layers} layers")
    conv = ShortConv(data["conv_L_cache"], bool(data["conv_bias"]))
    return {
        "mixers": tuple(conv if kind == "conv" else Attention() for kind in kinds),
        "qk_norm": "head",
    }


def write_lfm2(config: Config) -> dict[str, Any]:
    conv = next((word for word in config.mixers if isinstance(word, ShortConv)), ShortConv())
    kinds = ["conv" if isinstance(m, ShortConv) else "full_attention" for m in config.mixers]
    return {
        "layer_types": kinds,
        "full_attn_idxs": [i for i, kind in enumerate(kinds) if kind != "conv"],
        "conv_L_cache": conv.conv,
        "conv_bias": conv.bias,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": config.norm_eps,
    }


def lfm2(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    word, d = mixer_of(config, layer), config.d_model
    yield "operator_norm.weight", whole("attn_norm", d)
    yield "ffn_norm.weight", whole("mlp_norm", d)
    names, mlp = ("w1", "w3", "w2"), mlp_of(config, layer)
    if isinstance(mlp, MoE):
        yield from experts(config, layer, "feed_forward", names)
        if mlp.has_bias:
            yield "feed_forward.expert_bias", whole("router_bias", mlp.experts)
    else:
        for leaf, name, width in zip(
            ("gate", "up", "down"), names, (config.d_ff, config.d_ff, d), strict=True
        ):
            yield f"feed_forward.{name}.weight", whole(leaf, width)
    if not isinstance(word, ShortConv):
        names = {"o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
        for name, pieces in attention(config, layer):
            room, module, kind = name.split(".")
            yield f"{room}.{names.get(module, module)}.{kind}", pieces
        return
    sizes = word.shapes(config)
    for leaf, name in (("bcx", "in_proj"), ("conv", "conv"), ("o", "out_proj")):
        yield f"conv.{name}.weight", whole(leaf, sizes[leaf][-1])
        if word.bias:
            yield f"conv.{name}.bias", whole(f"{leaf}_bias", sizes[leaf][-1])
