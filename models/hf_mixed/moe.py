"""Attention with experts: Mixtral, MiniMax-M2 and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvjax.models.config import Config
from kvjax.models.feed_forward import FeedForward, GatedMLP, MoE, mlp_of
from kvjax.models.hf_family import Json, Piece
from kvjax.models.hf_mixed.pieces import attention, experts, mlp, norms, whole
from kvjax.ops.base.rope import Rope


def read_mixtral(data: Json, rope: Rope) -> dict[str, Any]:
    word = MoE(data["num_local_experts"], data["num_experts_per_tok"], data["intermediate_size"])
    return {"mlps": (word,) * data["num_hidden_layers"]}


def write_mixtral(config: Config) -> dict[str, Any]:
    word = config.mlps[0]
    assert isinstance(word, MoE)
    return {"num_local_experts": word.experts, "num_experts_per_tok": word.top}


def mixtral(config: Config, layer: int) -> Iterator[tuple[str, list[Piece]]]:
    yield from norms(config)
    yield from attention(config, layer)
    yield from experts(config, layer, "block_sparse_moe", ("w1", "w3", "w2"))


def spell_minimax_m2(data: Json) -> dict[str, Any]:
    """Published files give the number of rotated channels, where others give their share."""
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


def minimax_m2(config: Config, layer: int) -> Iterator[tuple[str, list[Piece]]]:
    yield from norms(config)
    yield from attention(config, layer)
    yield from experts(config, layer, "block_sparse_moe", ("w1", "w3", "w2"))
    word = mlp_of(config, layer)
    assert isinstance(word, MoE)
    yield "block_sparse_moe.e_score_correction_bias", whole("router_bias", word.experts)


def _sparse(data: Json) -> list[bool]:
    """Which layers have experts, from the settings of the Qwen families."""
    dense, step = data.get("mlp_only_layers") or [], data.get("decoder_sparse_step", 1)
    return [
        i not in dense and _count(data) > 0 and (i + 1) % step == 0 for i in range(data["num_hidden_layers"])
    ]


def _count(data: Json) -> int:
    """The number of experts, for which transformers 5 uses another key."""
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


def qwen3_moe(config: Config, layer: int) -> Iterator[tuple[str, list[Piece]]]:
    yield from norms(config)
    yield from attention(config, layer)
    yield from mlp(config, layer)
