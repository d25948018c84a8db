"""Config of files whose feed-forwards are experts."""

from __future__ import annotations

from collections.abc import Callable

from kvjax.base.errors import InputError
from kvjax.models.gguf.fields import SIGMOID, Json, attention, depth, routed, same, windows
from kvjax.models.gguf.reader import Gguf
from kvjax.models.gguf.rope import rope_fields


def qwen3_moe(file: Gguf) -> Json:
    data = {"model_type": "qwen3_moe", **attention(file), **routed(file, "num_experts")}
    return data | {"use_sliding_window": False, "norm_topk_prob": True}


def gpt_oss(file: Gguf) -> Json:
    """gpt-oss. Every second layer, from the first on, has a window."""
    data = attention(file)
    scaling = data.pop("rope_scaling", {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        # The model was trained with the fractional borders of YaRN, of which files say nothing.
        scaling["truncate"] = False
    data["rope_parameters"] = scaling | {"rope_theta": data["rope_theta"]}
    return {
        "model_type": "gpt_oss",
        **data,
        **windows(file, every=2),
        "num_local_experts": file.need("expert_count"),
        "num_experts_per_tok": file.need("expert_used_count"),
        "intermediate_size": file.of("expert_feed_forward_length", file.of("feed_forward_length")),
        "swiglu_limit": 7.0,
    }


def llama4(file: Gguf) -> Json:
    """Llama 4 (text). Files leave out what llama.cpp fixes: chunks, which layers rotate, growth and norms."""
    if file.of("attention.sliding_window") == 0 or not file.of("expert_count", 0):
        raise InputError(
            f"{file.path} holds a model without chunks or experts under the architecture of Llama 4, which "
            "is not read from GGUF: give the directory from the Hugging Face hub"
        )
    data = attention(file)
    dense = data["intermediate_size"]
    return {
        "model_type": "llama4_text",
        **data,
        "intermediate_size": file.need("expert_feed_forward_length"),
        "intermediate_size_mlp": dense,
        "num_local_experts": file.need("expert_count"),
        "num_experts_per_tok": file.need("expert_used_count"),
        "interleave_moe_layer_step": file.need("interleave_moe_layer_step"),
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        # Scout has these norms, Maverick has not.
        "use_qk_norm": file.need("expert_count") != 128,
    }


def glm4_moe(file: Gguf) -> Json:
    """GLM-4.5 to 4.7."""
    return {
        "model_type": "glm4_moe", **attention(file, partial=True), **shared_and_routed(file),
        "use_qk_norm": file.holds("attn_q_norm.weight"),
    }  # fmt: skip


def minimax_m2(file: Gguf) -> Json:
    data = attention(file, partial=True)
    rotated = round(data["head_dim"] * data["partial_rotary_factor"])
    width = file.of("expert_feed_forward_length", data["intermediate_size"])
    return {
        "model_type": "minimax_m2", **data, "rotary_dim": rotated, "intermediate_size": width,
        "num_local_experts": file.need("expert_count"), "num_experts_per_tok": file.need("expert_used_count"),
    }  # fmt: skip


def ernie_moe(file: Gguf) -> Json:
    """ERNIE 4.5 with experts."""
    data = {"model_type": "ernie4_5_moe", **attention(file), "use_bias": file.holds("attn_q.bias")}
    return data | {
        "moe_num_experts": file.need("expert_count"),
        "moe_k": file.need("expert_used_count"),
        "moe_intermediate_size": file.need("expert_feed_forward_length"),
        "moe_num_shared_experts": file.of("expert_shared_count", 0),
        "moe_layer_start_index": file.of("leading_dense_block_count", 0),
        "moe_layer_interval": file.of("interleave_moe_layer_step", 1),
        "moe_layer_end_index": -1,
    }


def shared_and_routed(file: Gguf) -> Json:
    """Routed experts beside shared ones, after dense layers, as DeepSeek has them."""
    groups, chosen = file.of("expert_group_count", 1), file.of("expert_group_used_count", 1)
    return routed(file, "n_routed_experts") | {
        "n_shared_experts": file.of("expert_shared_count", 0),
        "first_k_dense_replace": file.of("leading_dense_block_count", 0),
        "routed_scaling_factor": float(file.of("expert_weights_scale", 1.0)) or 1.0,
        "norm_topk_prob": bool(file.of("expert_weights_norm", False)),
        "n_group": groups,
        "topk_group": chosen,
    }


def deepseek2(file: Gguf) -> Json:
    """DeepSeek-V2 or, if sigmoids choose experts, V3. Newer files give sizes of heads separately (`_mla`)."""
    third = file.of("expert_gating_func", 1) == SIGMOID
    data = {
        "model_type": "deepseek_v3" if third else "deepseek_v2",
        **latent(file),
        **shared_and_routed(file),
    }
    return data | {"topk_method": "group_limited_greedy" if data["n_group"] > 1 else "greedy"}


def indexed(model_type: str) -> Callable[[Gguf], Json]:
    """DeepSeek-V3.2 and GLM-5: latent attention to the tokens that an indexer picks."""

    def read(file: Gguf) -> Json:
        data = {"model_type": model_type, **latent(file), **shared_and_routed(file)}
        data |= {
            "index_n_heads": file.need("attention.indexer.head_count"),
            "index_head_dim": file.need("attention.indexer.key_length"),
            "index_topk": file.need("attention.indexer.top_k"),
        }
        if (own := file.of("attention.indexer.types")) is not None:
            data["indexer_types"] = ["full" if flag else "shared" for flag in own[: depth(file)]]
        return data

    return read


def latent(file: Gguf) -> Json:
    """Sizes of latent attention."""
    rotated = file.need("rope.dimension_count")
    width = file.of("attention.key_length_mla", file.need("attention.key_length"))
    heads = same(file, "attention.head_count")
    return {
        "intermediate_size": same(file, "feed_forward_length"),
        "rms_norm_eps": file.need("attention.layer_norm_rms_epsilon"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": file.need("attention.kv_lora_rank"),
        "q_lora_rank": file.of("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": file.of("attention.value_length_mla", file.need("attention.value_length")),
        **rope_fields(file, rotated),
    }
