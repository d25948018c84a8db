"""Qwen3-Next and Qwen3.5: Gated DeltaNet, gated attention, with or without experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.feed_forward import MoE
from kvjax.models.hf_family import Json, TensorRows
from kvjax.models.hf_mixed.moe import qwen_experts, write_qwen_experts
from kvjax.models.hf_mixed.pieces import attention, mlp, norms, stacked_rows, whole
from kvjax.models.mixers.attention import Attention, mixer_of
from kvjax.models.mixers.recurrent import GatedDelta
from kvjax.ops.base.rope import Rope


def read_qwen3_next(data: Json, rope: Rope) -> dict[str, Any]:
    shared = data["shared_expert_intermediate_size"]
    return read_qwen3_5(data, rope) | {"mlps": qwen_experts(data, shared=shared, shared_gate=True)}


def spell_qwen3_5_moe(data: Json) -> dict[str, Any]:
    """Spell the width of a dense feed-forward, which the class lacks; its files give no width for one."""
    return {} if "intermediate_size" in data else {"intermediate_size": data["moe_intermediate_size"]}


def read_qwen3_5(data: Json, rope: Rope) -> dict[str, Any]:
    linear = GatedDelta(
        data["linear_num_value_heads"], data["linear_key_head_dim"], data["linear_value_head_dim"],
        data["linear_num_key_heads"], conv=data["linear_conv_kernel_dim"],
    )  # fmt: skip
    layers = data["num_hidden_layers"]
    every = data.get("full_attention_interval") or 4
    kinds = data.get("layer_types") or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)
    ]
    unknown = sorted(set(kinds) - {"linear_attention", "full_attention"})
    if unknown or len(kinds) != layers:
        raise InputError(
            f"layer_types {kinds} must name linear_attention or full_attention for each of {layers} layers"
        )
    bias = bool(data.get("attention_bias", False))
    return {
        "mixers": tuple(linear if kind == "linear_attention" else Attention(gate=True) for kind in kinds),
        "qk_norm": "head",
        "norm_offset": 1.0,
        "qkv_bias": bias,
        "o_bias": bias,
    }


def write_qwen3_next(config: Config) -> dict[str, Any]:
    experts = [w for w in config.mlps if isinstance(w, MoE)]
    shared = {"shared_expert_intermediate_size": experts[0].shared}
    return write_qwen3_5(config) | write_qwen_experts(config) | shared


def write_qwen3_5(config: Config) -> dict[str, Any]:
    linear = next((m for m in config.mixers if isinstance(m, GatedDelta)), None)
    if linear is None:
        raise IndexError("no layer of gated deltas")
    kinds = ["linear_attention" if isinstance(m, GatedDelta) else "full_attention" for m in config.mixers]
    return {
        "linear_num_value_heads": linear.heads,
        "linear_num_key_heads": linear.key_heads,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
        "linear_conv_kernel_dim": linear.conv,
        "layer_types": kinds,
    }


def qwen3_next(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    word = mixer_of(config, layer)
    yield from norms(config)
    if isinstance(word, Attention):
        for name, pieces in attention(config, layer):
            # A head's queries are followed by its gate.
            if name.startswith("self_attn.q_proj"):
                rows = (
                    np.arange(config.heads)[:, None] * 2 * config.head_dim + np.arange(config.head_dim)[None]
                )
                gate = "attn_gate" if name.endswith("weight") else "attn_gate_bias"
                pieces = [
                    TensorRows(pieces[0].leaf, rows.ravel()),
                    TensorRows(gate, rows.ravel() + config.head_dim),
                ]
            yield name, pieces
    elif isinstance(word, GatedDelta):
        joined = config.family == "qwen3_next"
        yield from _joined_projections(word) if joined else _projections(word)
        yield from _gated_delta(word, config)
    yield from mlp(config, layer, "shared_expert")


def _projections(word: GatedDelta) -> Iterator[tuple[str, list[TensorRows]]]:
    """Four matrices: q, k and v concatenated, z, b and a."""
    keys, values = word.key_heads * word.key_dim, word.heads * word.value_dim
    yield "linear_attn.in_proj_qkv.weight", stacked_rows({"q": keys, "k": keys, "v": values})
    yield "linear_attn.in_proj_z.weight", whole("out_gate", values)
    yield "linear_attn.in_proj_b.weight", whole("beta", word.heads)
    yield "linear_attn.in_proj_a.weight", whole("decay", word.heads)


def _joined_projections(word: GatedDelta) -> Iterator[tuple[str, list[TensorRows]]]:
    """Per key head: its q, its k, and the v and z of its value heads; then its b and a."""
    group, k, v = word.heads // word.key_heads, word.key_dim, word.value_dim
    parts = {"q": k, "k": k, "v": group * v, "out_gate": group * v}
    width = sum(parts.values())
    pieces = stacked_rows(parts)
    heads = np.arange(word.key_heads)[:, None]
    yield (
        "linear_attn.in_proj_qkvz.weight",
        [TensorRows(p.leaf, (heads * width + p.rows[None]).ravel()) for p in pieces],
    )
    gates = stacked_rows({"beta": group, "decay": group})
    yield (
        "linear_attn.in_proj_ba.weight",
        [TensorRows(p.leaf, (heads * 2 * group + p.rows[None]).ravel()) for p in gates],
    )


def _gated_delta(word: GatedDelta, config: Config) -> Iterator[tuple[str, list[TensorRows]]]:
    sizes = word.shapes(config)
    names = {"dt_bias": "dt_bias", "A_log": "a_log", "norm.weight": "out_norm", "conv1d.weight": "conv"}
    for name, leaf in names.items():
        yield f"linear_attn.{name}", whole(leaf, sizes[leaf][-1])
    yield "linear_attn.out_proj.weight", whole("o", config.d_model)
