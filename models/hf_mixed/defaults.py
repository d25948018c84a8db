"""What transformers assumes for a setting that the config.json of a family leaves out."""

from __future__ import annotations

import math

COMMON = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 10000.0}
DEEPSEEK = COMMON | {
    "max_position_embeddings": 2048,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
}
KIMI = COMMON | {
    "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "routed_scaling_factor": 1.0,
    "num_expert_group": 1, "topk_group": 1, "num_shared_experts": 0, "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
}  # fmt: skip
MAMBA_2 = {
    "n_groups": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "layer_norm_epsilon": 1e-5,
    "time_step_limit": (0.0, math.inf), "state_size": 128, "head_dim": 64, "num_heads": 128,
    "max_position_embeddings": 2**20, "rope_theta": 10000.0, "intermediate_size": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
}  # fmt: skip
NEXT = COMMON | {
    "linear_conv_kernel_dim": 4, "decoder_sparse_step": 1, "norm_topk_prob": True, "head_dim": 256,
    "partial_rotary_factor": 0.25,
}  # fmt: skip
YARN_32 = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
OSS = COMMON | {
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "head_dim": 64,
    "num_key_value_heads": 8, "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4,
    "swiglu_limit": 7.0, "rope_parameters": YARN_32,
}  # fmt: skip
QWEN_3_5 = COMMON | {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "head_dim": 256, "partial_rotary_factor": 0.25,
    "num_key_value_heads": 4,
}  # fmt: skip
GLM = COMMON | {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1,
}  # fmt: skip
GRANITE = COMMON | {
    "max_position_embeddings": 2048, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
    "residual_multiplier": 1.0, "attention_multiplier": 1.0,
}  # fmt: skip
GRANITE_4 = GRANITE | {
    "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024,
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto",
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "intermediate_size": 11008,
}  # fmt: skip
LFM_2 = COMMON | {
    "max_position_embeddings": 128000, "rope_theta": 1e6, "num_key_value_heads": 8, "norm_eps": 1e-5,
    "conv_L_cache": 3, "conv_bias": False, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True, "tie_word_embeddings": True,
}  # fmt: skip
GLM_LITE = COMMON | {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1,
}  # fmt: skip
DEEPSEEK_INDEXED = DEEPSEEK | {
    "max_position_embeddings": 163840, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "n_shared_experts": 1,
    "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64,
}  # fmt: skip
GLM_INDEXED = DEEPSEEK_INDEXED | {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "n_group": 1, "topk_group": 1,
    "index_n_heads": 32,
}  # fmt: skip
MINIMAX = COMMON | {
    "max_position_embeddings": 196608, "rope_theta": 5e6, "head_dim": 128, "num_key_value_heads": 8,
    "num_local_experts": 256, "num_experts_per_tok": 8,
}  # fmt: skip
LFM_2_MOE = {n: x for n, x in LFM_2.items() if not n.startswith("block_")} | {
    "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2, "num_experts": 32,
    "num_experts_per_tok": 4, "use_expert_bias": True, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
}  # fmt: skip
ERNIE_MOE = COMMON | {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 500000.0, "num_key_value_heads": 4,
    "tie_word_embeddings": True, "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64,
    "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}  # fmt: skip
BAMBA = COMMON | {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 262144, "num_key_value_heads": 8, "mamba_n_heads": 128,
    "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}  # fmt: skip
JAMBA = COMMON | {
    "max_position_embeddings": 262144, "num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2,
    "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 8, "attn_layer_offset": 4,
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": "auto",
    "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip
LLAMA_4 = COMMON | {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "head_dim": 128, "num_key_value_heads": 8,
    "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 16,
    "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "use_qk_norm": True,
    "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "attn_temperature_tuning": True,
    "floor_scale": 8192, "attn_scale": 0.1, "rope_theta": 500000.0,
}  # fmt: skip
NEMOTRON_H = COMMON | {
    "max_position_embeddings": 4096, "head_dim": 128, "num_key_value_heads": 8, "intermediate_size": 21504,
    "mlp_hidden_act": "relu2", "mlp_bias": False, "use_bias": False, "use_conv_bias": True,
    "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "n_group": 1,
}  # fmt: skip
RWKV_7 = {
    "hidden_ratio": 4, "head_dim": 64, "decay_low_rank_dim": 64, "gate_low_rank_dim": 128,
    "a_low_rank_dim": 64, "v_low_rank_dim": 16, "hidden_act": "sqrelu", "max_position_embeddings": 2**20,
    "norm_first": True, "norm_bias": True, "norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}  # fmt: skip
FALCON_H1 = COMMON | {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "num_key_value_heads": 8, "mamba_d_ssm": 1024,
    "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_norm_before_gate": True,
    "mamba_rms_norm": False, "time_step_limit": (0.0, math.inf), "lm_head_multiplier": 1.0,
    "embedding_multiplier": 1.0, "key_multiplier": 1.0, "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0,
}  # fmt: skip
GEMMA_3N = COMMON | {
    "vocab_size": 262400, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "sliding_window": 512,
    "tie_word_embeddings": True, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "final_logit_softcapping": 30.0, "num_kv_shared_layers": 15, "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144, "altup_active_idx": 0, "altup_correct_scale": True,
    "altup_num_inputs": 4, "laurel_rank": 64,
}  # fmt: skip
GEMMA_4 = COMMON | {
    "vocab_size": 262144, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "sliding_window": 512,
    "tie_word_embeddings": True, "global_head_dim": 512, "attention_k_eq_v": False,
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
    "enable_moe_block": False, "use_double_wide_mlp": False,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
GEMMA_4_UNIFIED = GEMMA_4 | {
    "max_position_embeddings": 262144, "sliding_window": 1024, "hidden_size_per_layer_input": 0,
}  # fmt: skip
