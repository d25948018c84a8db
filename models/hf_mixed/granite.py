"""Granite 3 and 4: multipliers, and in Granite 4 Mamba-2 beside attention without rotation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.feed_forward import GatedMLP, MoE, mlp_of
from kvjax.models.hf_family import Json, TensorRows
from kvjax.models.hf_mixed.mamba2 import mamba2_block
from kvjax.models.hf_mixed.pieces import attention, norms, stacked_rows, whole
from kvjax.models.hf_numbers import int_if_whole
from kvjax.models.mixers.attention import Attention, mixer_of
from kvjax.models.mixers.mamba2 import Mamba2
from kvjax.ops.base.rope import Rope


def read_granite(data: Json, rope: Rope) -> dict[str, Any]:
    bias = bool(data.get("attention_bias"))
    return {
        "embed_scale": float(data["embedding_multiplier"]),
        "query_scale": float(data["attention_multiplier"]),
        "residual_scale": float(data["residual_multiplier"]),
        "logit_scale": 1 / float(data["logits_scaling"]),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bool(data.get("mlp_bias")),
    }


def write_granite(config: Config) -> dict[str, Any]:
    return {
        "embedding_multiplier": config.embed_scale,
        "attention_multiplier": config.scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": round(1 / config.logit_scale, 12),
        "mlp_bias": config.mlp_bias,
    }


def spell_granite_4(data: Json) -> dict[str, Any]:
    """Without experts, the width of the feed-forwards is that of the shared one."""
    return {} if data["num_local_experts"] else {"intermediate_size": data["shared_intermediate_size"]}


# What transformers since 5.24 writes for the kinds of layers.
_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}


def read_granite_4(data: Json, rope: Rope) -> dict[str, Any]:
    if data["mamba_proj_bias"] or not data["mamba_conv_bias"]:
        raise InputError(
            "mamba_proj_bias = true or mamba_conv_bias = false is not supported for granitemoehybrid"
        )
    layers, kinds = data["num_hidden_layers"], data.get("layer_types") or []
    kinds = [_KINDS.get(kind, kind) for kind in kinds] or ["mamba"] * layers
    if {*kinds} - {"mamba", "attention"} or len(kinds) != layers:
        raise InputError(f"layer_types {kinds} must name mamba or attention for each of {layers} layers")
    heads, inner = data["mamba_n_heads"], data["mamba_expand"] * data["hidden_size"]
    width = inner // heads if data["mamba_d_head"] == "auto" else data["mamba_d_head"]
    state = Mamba2(heads, data["mamba_d_state"], width, data["mamba_n_groups"], conv=data["mamba_d_conv"])
    attends = Attention(rotates=data.get("position_embedding_type") == "rope")
    experts = data["num_local_experts"]
    mlp = MoE(
        experts, data["num_experts_per_tok"], data["intermediate_size"],
        shared=data["shared_intermediate_size"],
    ) if experts else GatedMLP()  # fmt: skip
    return read_granite(data, rope) | {
        "mixers": tuple(state if kind == "mamba" else attends for kind in kinds),
        "mlps": (mlp,) * layers,
    }


def write_granite_4(config: Config) -> dict[str, Any]:
    turning = [word.rotates for word in config.mixers if isinstance(word, Attention)]
    mlp = config.mlps[0]
    out: dict[str, Any] = {
        "layer_types": ["attention" if isinstance(m, Attention) else "mamba" for m in config.mixers],
        "position_embedding_type": "rope" if any(turning) else "nope",
        "shared_intermediate_size": config.d_ff,
        "num_local_experts": 0,
    }
    if isinstance(mlp, MoE):
        out |= {"num_local_experts": mlp.experts, "num_experts_per_tok": mlp.top}
        out |= {"shared_intermediate_size": mlp.shared}
    state = next((word for word in config.mixers if isinstance(word, Mamba2)), None)
    if state is not None:
        out |= {
            "mamba_n_heads": state.heads,
            "mamba_n_groups": state.key_heads,
            "mamba_d_state": state.key_dim,
            "mamba_d_head": state.value_dim,
            "mamba_d_conv": state.conv,
            "mamba_expand": int_if_whole(state.heads * state.value_dim / config.d_model),
        }
    return write_granite(config) | out


def granite_4(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    yield from norms(config)
    if isinstance(mixer_of(config, layer), Mamba2):
        yield from mamba2_block(config, layer, "mamba")
    else:
        yield from attention(config, layer)
    word, d = mlp_of(config, layer), config.d_model
    if not isinstance(word, MoE):
        yield "shared_mlp.input_linear.weight", stacked_rows({"gate": config.d_ff, "up": config.d_ff})
        yield "shared_mlp.output_linear.weight", whole("down", d)
        return
    yield (
        "shared_mlp.input_linear.weight",
        stacked_rows({"shared_gate": word.shared, "shared_up": word.shared}),
    )
    yield "shared_mlp.output_linear.weight", whole("shared_down", d)
    yield "block_sparse_moe.router.layer.weight", whole("router", word.experts)
    both = stacked_rows({"experts_gate": word.width, "experts_up": word.width})
    for name, pieces in (("input", both), ("output", whole("experts_down", d))):
        yield (
            f"block_sparse_moe.{name}_linear.weight",
            [p._replace(expert=e, stacked=True) for e in range(word.experts) for p in pieces],
        )
