"""Attention with experts: Mixtral, MiniMax-M2, Qwen3-MoE and ERNIE 4.5."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.feed_forward import FeedForward, GatedMLP, MoE, mlp_of
from kvjax.models.hf_family import Json, TensorRows
from kvjax.models.hf_mixed.pieces import attention, experts, in_pairs, mlp, norms, whole
from kvjax.ops.base.rope import Rope


def read_mixtral(data: Json, rope: Rope) -> dict[str, Any]:
    word = MoE(data["num_local_experts"], data["num_experts_per_tok"], data["intermediate_size"])
    return {"mlps": (word,) * data["num_hidden_layers"]}


def write_mixtral(config: Config) -> dict[str, Any]:
    word = config.mlps[0]
    assert isinstance(word, MoE)
    return {"num_local_experts": word.experts, "num_experts_per_tok": word.top}


def mixtral(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    yield from norms(config)
    yield from attention(config, layer)
    yield from experts(config, layer, "block_sparse_moe", ("w1", "w3", "w2"))


def spell_minimax_m2(data: Json) -> dict[str, Any]:
    """Spell the share of rotated channels, where published files give their number and others the share."""
    if "rotary_dim" not in data or data.get("partial_rotary_factor") is not None:
        return {}
    return {"partial_rotary_factor": data["rotary_dim"] / data["head_dim"]}


def read_minimax_m2(data: Json, rope: Rope) -> dict[str, Any]:
    word = MoE(
        data["num_local_experts"], data["num_experts_per_tok"], data["intermediate_size"], scores="sigmoid"
    )
    return {"mlps": (word,) * data["num_hidden_layers"], "qk_norm": "full"}


def write_minimax_m2(config: Config) -> dict[str, Any]:
    # The authors' class has a switch for the norms, and gives the number of rotated channels.
    own = {"use_qk_norm": True, "rotary_dim": config.rope.turning(config.head_dim)}
    return write_mixtral(config) | own


def minimax_m2(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    yield from norms(config)
    yield from attention(config, layer)
    yield from experts(config, layer, "block_sparse_moe", ("w1", "w3", "w2"))
    word = mlp_of(config, layer)
    assert isinstance(word, MoE)
    yield "block_sparse_moe.e_score_correction_bias", whole("router_bias", word.experts)


def spell_ernie_moe(data: Json) -> dict[str, Any]:
    if data.get("use_bias"):
        raise InputError("use_bias = true is not supported for ernie4_5_moe: expected no biases")
    last = data["moe_layer_end_index"]
    return {"moe_layer_end_index": data["num_hidden_layers"] - 1 if last == -1 else last}


def read_ernie_moe(data: Json, rope: Rope) -> dict[str, Any]:
    """Softmax scores, to which a learned bias is added for the choice alone."""
    word = MoE(
        data["moe_num_experts"], data["moe_k"], data["moe_intermediate_size"], biased=True,
        shared=data["moe_intermediate_size"] * (data["moe_num_shared_experts"] or 0),
    )  # fmt: skip
    first, last = data["moe_layer_start_index"], data["moe_layer_end_index"]
    sparse = [
        first <= i <= last and (i + 1) % data["moe_layer_interval"] == 0
        for i in range(data["num_hidden_layers"])
    ]
    return {"mlps": tuple(word if one else GatedMLP() for one in sparse)}


def write_ernie_moe(config: Config) -> dict[str, Any]:
    at = [i for i, word in enumerate(config.mlps) if isinstance(word, MoE)]
    word = config.mlps[at[0]]
    assert isinstance(word, MoE)
    return {
        "moe_num_experts": word.experts,
        "moe_k": word.top,
        "moe_intermediate_size": word.width,
        "moe_num_shared_experts": word.shared // word.width,
        "moe_layer_start_index": at[0],
        "moe_layer_end_index": at[-1],
        "moe_layer_interval": at[1] - at[0] if len(at) > 1 else 1,
        "use_bias": False,
    }


def ernie_moe(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    yield from norms(config)
    yield from in_pairs(config, attention(config, layer))
    for name, pieces in mlp(config, layer, "shared_experts"):
        if name == "mlp.gate.e_score_correction_bias":
            shape = (1, len(pieces[0].rows))
            yield "mlp.moe_statics.e_score_correction_bias", [p._replace(shape=shape) for p in pieces]
        else:
            yield name, pieces


def _sparse(data: Json) -> list[bool]:
    """Which layers have experts, from the settings of the Qwen families."""
    dense, step = data.get("mlp_only_layers") or [], data.get("decoder_sparse_step", 1)
    return [
        i not in dense and _count(data) > 0 and (i + 1) % step == 0 for i in range(data["num_hidden_layers"])
    ]


def _count(data: Json) -> int:
    """Read the number of experts, for which transformers 5 uses another key."""
    return data["num_local_experts"] if "num_local_experts" in data else data["num_experts"]


def qwen_experts(data: Json, **shared: Any) -> tuple[FeedForward, ...]:
    word = MoE(
        _count(data), data["num_experts_per_tok"], data["moe_intermediate_size"],
        normalise=bool(data["norm_topk_prob"]), **shared,
    )  # fmt: skip
    return tuple(word if sparse else GatedMLP() for sparse in _sparse(data))


def write_qwen_experts(config: Config) -> dict[str, Any]:
    words = [w for w in config.mlps if isinstance(w, MoE)]
    first = words[0]
    return {
        "num_experts": first.experts,
        "num_experts_per_tok": first.top,
        "moe_intermediate_size": first.width,
        "norm_topk_prob": first.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, w in enumerate(config.mlps) if not isinstance(w, MoE)],
    }


def read_qwen3_moe(data: Json, rope: Rope) -> dict[str, Any]:
    bias = bool(data.get("attention_bias", False))
    return {"qk_norm": "head", "qkv_bias": bias, "o_bias": bias, "mlps": qwen_experts(data)}


def qwen3_moe(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    yield from norms(config)
    yield from attention(config, layer)
    yield from mlp(config, layer)
