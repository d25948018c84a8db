"""Hugging Face families whose layers are mixers and experts: one row each, with what sets it apart."""

from __future__ import annotations

import math

from kvjax.models.hf_family import Family
from kvjax.models.hf_mixed.deepseek import deepseek, read_deepseek, write_deepseek
from kvjax.models.hf_mixed.kimi_linear import kimi_linear, read_kimi_linear, write_kimi_linear
from kvjax.models.hf_mixed.mamba2 import mamba2, read_mamba2, write_mamba2
from kvjax.models.hf_mixed.moe import (
    mixtral,
    qwen3_moe,
    read_mixtral,
    read_qwen3_moe,
    write_mixtral,
    write_qwen_experts,
)
from kvjax.models.hf_mixed.qwen3_next import qwen3_next, read_qwen3_next, write_qwen3_next
from kvjax.models.hf_windows import IN_ALL_LAYERS, in_layers

_COMMON = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 10000.0}
_DEEPSEEK = _COMMON | {
    "max_position_embeddings": 2048,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
}
_KIMI = _COMMON | {
    "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "routed_scaling_factor": 1.0,
    "num_expert_group": 1, "topk_group": 1, "num_shared_experts": 0, "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
}  # fmt: skip
_MAMBA_2 = {
    "n_groups": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "layer_norm_epsilon": 1e-5,
    "time_step_limit": (0.0, math.inf), "state_size": 128, "head_dim": 64, "num_heads": 128,
    "max_position_embeddings": 2**20, "rope_theta": 10000.0, "intermediate_size": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
}  # fmt: skip
_NEXT = _COMMON | {
    "linear_conv_kernel_dim": 4, "decoder_sparse_step": 1, "norm_topk_prob": True, "head_dim": 256,
    "partial_rotary_factor": 0.25,
}  # fmt: skip

MIXED: dict[str, Family] = {
    "mixtral": Family(
        "MixtralForCausalLM",
        _COMMON | {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 1e6}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8}
        | {"sliding_window": None},
        read_mixtral, write_mixtral, mixtral, windows=IN_ALL_LAYERS,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _COMMON | {"decoder_sparse_step": 1, "norm_topk_prob": False, "num_key_value_heads": 4}
        | {"max_window_layers": 28},
        read_qwen3_moe, write_qwen_experts, qwen3_moe,
        windows=in_layers(lambda data, i: i >= data["max_window_layers"], switch="use_sliding_window"),
    ),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", _DEEPSEEK, read_deepseek, write_deepseek, deepseek),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        _DEEPSEEK | {"max_position_embeddings": 4096, "first_k_dense_replace": 3, "norm_topk_prob": True}
        | {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
        read_deepseek, write_deepseek, deepseek, more_layers=True,
    ),
    "mamba2": Family(
        "Mamba2ForCausalLM", _MAMBA_2, read_mamba2, write_mamba2, mamba2,
        top=("backbone", "embeddings", "norm_f"),
    ),
    "kimi_linear": Family(
        "KimiLinearForCausalLM", _KIMI, read_kimi_linear, write_kimi_linear, kimi_linear, more_layers=True
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM", _NEXT, read_qwen3_next, write_qwen3_next, qwen3_next, partial_rotary=True
    ),
}  # fmt: skip
