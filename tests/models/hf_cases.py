"""Tiny random checkpoints of every family, as the config.json they have on the hub.

Shared by the fixtures of the plain suite, the script that makes them, and the parity suite.

Between them: odd head counts, head_dim other than D / N, every rotary scaling in the old and the new
spelling, windows shorter than the prompt, tied and untied embeddings, every bias and norm.
"""

from typing import Any

TOKENS = 40
"""Length of the prompts: beyond every window and every original context below."""

_SIZES = {
    "vocab_size": 80,
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# The classes of Llama and Gemma in transformers 5.24 refuse a width that is no multiple of the heads.
_WHOLE = {"hidden_size": 24}
_THREE = {"num_attention_heads": 3, "num_key_value_heads": 1}
_MQA = {"num_attention_heads": 5, "num_key_value_heads": 1}


def _case(model_type: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": model_type, **_SIZES, **fields}


def _even(model_type: str, hidden_size: int, **fields: Any) -> dict[str, Any]:
    """head_dim left out of the file: D / N."""
    case = _case(model_type, **fields, hidden_size=hidden_size)
    del case["head_dim"]
    return case


def _llama(**rope: Any) -> dict[str, Any]:
    return _case("llama", **_WHOLE, rope_theta=1000.0, tie_word_embeddings=True, **rope)


def _new(kind: str, theta: float = 1000.0, **params: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **params}


_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_MLA = {
    "kv_lora_rank": 12, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 7,
    "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 4,
}  # fmt: skip
_ROUTED = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}  # fmt: skip


def _mamba(**fields: Any) -> dict[str, Any]:
    sizes = {n: _SIZES[n] for n in ("vocab_size", "hidden_size", "num_hidden_layers")}
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    mixer = dict(num_heads=5, head_dim=8, state_size=6, n_groups=1, expand=2, conv_kernel=4, chunk_size=8)
    return {"model_type": "mamba2", **sizes, **none, **mixer, "layer_norm_epsilon": 1e-4, **fields}


_LINEAR = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 8,
    "linear_num_value_heads": 4,
}  # fmt: skip
_PARTIAL = {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5,
        "mrope_interleaved": True, "mrope_section": [1, 1, 0],
    },
}  # fmt: skip
_GRANITE = {
    "embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
}  # fmt: skip
_GRANITE_STATE = {
    "mamba_n_heads": 6, "mamba_n_groups": 1, "mamba_d_state": 5, "mamba_d_head": "auto", "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 8, "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip
_EXAONE_LLAMA_3 = {
    "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def _next(**fields: Any) -> dict[str, Any]:
    return _case(
        "qwen3_next", **_EXPERTS, **_LINEAR, shared_expert_intermediate_size=10, norm_topk_prob=True,
        partial_rotary_factor=0.5, rope_theta=1000.0, **fields,
    ) | {"num_hidden_layers": 4}  # fmt: skip


_OSS = {"num_local_experts": 5, "num_experts_per_tok": 2}
_LONG = {
    "num_attention_heads": 3, "num_key_value_heads": 1, "partial_rotary_factor": 0.5, "sliding_window": None,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.25], "long_factor": [1.5, 6.0]},
}  # fmt: skip


def _nemotron_h(pattern: str, **fields: Any) -> dict[str, Any]:
    case = _case(
        "nemotron_h", **_WHOLE, hybrid_override_pattern=pattern, ssm_state_size=5, mamba_num_heads=6,
        mamba_head_dim=8, n_groups=2, expand=2, conv_kernel=4, chunk_size=8, layer_norm_epsilon=1e-4,
        mlp_hidden_act="relu2", time_step_min=1e-12, **fields,
    )  # fmt: skip
    del case["rms_norm_eps"], case["num_hidden_layers"]
    return case


def _falcon_h1(**fields: Any) -> dict[str, Any]:
    return _case(
        "falcon_h1", **_WHOLE, mamba_d_ssm=30, mamba_n_heads=6, mamba_d_head=5, mamba_d_state=7,
        mamba_d_conv=4, mamba_chunk_size=8, embedding_multiplier=1.7, lm_head_multiplier=0.6,
        key_multiplier=0.8, attention_in_multiplier=1.3, attention_out_multiplier=0.7,
        ssm_in_multiplier=1.2, ssm_out_multiplier=0.9, ssm_multipliers=[0.7, 1.4, 0.8, 1.3, 0.6],
        mlp_multipliers=[1.5, 0.8], **fields,
    )  # fmt: skip


def _gemma_4(layers: int, full: list[int], **fields: Any) -> dict[str, Any]:
    kinds = ["full_attention" if i in full else "sliding_attention" for i in range(layers)]
    return _case(
        "gemma4_text", **_WHOLE, global_head_dim=16, sliding_window=6, layer_types=kinds,
        hidden_activation="gelu_pytorch_tanh",
        rope_parameters={
            "full_attention": _new("proportional", 5000.0, partial_rotary_factor=0.25),
            "sliding_attention": _new("default", 500.0),
        },
        **fields,
    ) | {"num_hidden_layers": layers}  # fmt: skip


CASES: dict[str, dict[str, Any]] = {
    "llama": _case("llama", **_WHOLE, attention_bias=True, mlp_bias=True, rope_theta=500.0),
    "llama_mqa_tied": _case("llama", **_MQA, tie_word_embeddings=True),
    "llama_plain_heads": _case("llama", head_dim=None, num_attention_heads=5, num_key_value_heads=None),
    "llama_linear": _llama(rope_scaling={"type": "linear", "factor": 2.5}),
    "llama_dynamic": _llama(max_position_embeddings=16, rope_scaling={"type": "dynamic", "factor": 2.0}),
    "llama_dynamic_short": _llama(rope_parameters=_new("dynamic", factor=3.0)),
    "llama_llama3": _llama(
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    ),
    "llama_yarn": _llama(
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    ),
    "llama_yarn_mscale": _llama(
        rope_parameters=_new(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=4.0,
            beta_slow=0.5,
            mscale=0.7,
            mscale_all_dim=1.0,
            truncate=False,
        )
    ),
    "mistral": _case("mistral", sliding_window=7, rope_theta=1000.0),
    "mistral_full": _case("mistral", **_MQA, sliding_window=None, rope_parameters=_new("default", 1e6)),
    "qwen2": _even(
        "qwen2",
        24,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=1,
        tie_word_embeddings=True,
        rope_theta=1e6,
    ),
    "qwen2_yarn": _even(
        "qwen2",
        24,
        sliding_window=9,
        rope_parameters=_new("yarn", factor=2.0, original_max_position_embeddings=32),
    ),
    "qwen3": _case(
        "qwen3",
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_theta=1e6,
    ),
    "gemma2": _case(
        "gemma2",
        **_WHOLE,
        num_hidden_layers=4,
        query_pre_attn_scalar=11,
        sliding_window=5,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=4.0,
        hidden_activation="gelu_pytorch_tanh",
    ),
    "gemma3_text": _case(
        "gemma3_text",
        **_WHOLE,
        num_hidden_layers=4,
        query_pre_attn_scalar=8,
        sliding_window=6,
        sliding_window_pattern=3,
        rope_theta=1e6,
        rope_local_base_freq=500.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "gemma3_nested": _case(
        "gemma3_text",
        **_MQA,
        query_pre_attn_scalar=13,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        tie_word_embeddings=False,
        rope_parameters={
            "full_attention": _new(
                "llama3",
                1e5,
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
            "sliding_attention": _new("linear", 300.0, factor=2.0),
        },
    ),
    "phi3": _even("phi3", 24, **_THREE, partial_rotary_factor=0.5, sliding_window=11),
    "phi3_full": _even("phi3", 24, sliding_window=None, tie_word_embeddings=True),
    "olmo2": _even("olmo2", 24, rope_theta=5e5),
    "mixtral": _case(
        "mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None, rope_theta=1000.0
    ),
    "mixtral_window": _case(
        "mixtral", **_MQA, num_local_experts=3, num_experts_per_tok=1, sliding_window=7,
        tie_word_embeddings=True,
    ),
    "qwen3_moe": _case(
        "qwen3_moe", **_EXPERTS, norm_topk_prob=True, decoder_sparse_step=2, rope_theta=1000.0
    ),
    "qwen3_moe_dense_first": _case("qwen3_moe", **_EXPERTS, norm_topk_prob=False, mlp_only_layers=[0]),
    "deepseek_v2": _case(
        "deepseek_v2", **_MLA, **_ROUTED, topk_method="greedy", first_k_dense_replace=1, rope_theta=1000.0
    ),
    "deepseek_v3": _case(
        "deepseek_v3", **_MLA | {"q_lora_rank": 10}, **_ROUTED, n_group=3, topk_group=2, norm_topk_prob=True,
        first_k_dense_replace=1,
        rope_scaling=_new(
            "yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.8
        ),
    ),
    "deepseek_v3_plain": _case(
        "deepseek_v3", **_MLA, **_ROUTED, n_group=1, topk_group=1, norm_topk_prob=False, attention_bias=True,
        first_k_dense_replace=0,
    ),
    "mamba2": _mamba(tie_word_embeddings=True),
    "mamba2_groups": _mamba(n_groups=5, expand=4, num_heads=10, conv_kernel=3),
    "qwen3_next": _next(linear_num_key_heads=2, mlp_only_layers=[1]),
    "qwen3_next_pattern": _next(linear_num_key_heads=4, full_attention_interval=2),
    # Without mscale_all_dim: with it, transformers 5.2 leaves out a factor that the authors have.
    "deepseek_v2_yarn": _case(
        "deepseek_v2", **_MLA, **_ROUTED, topk_method="greedy", first_k_dense_replace=1,
        rope_scaling=_new("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "olmo3": _even("olmo3", 24, sliding_window=6, rope_theta=5e5) | {"num_hidden_layers": 5},
    # Without windows: where there are some, transformers 5.2 scales the rotation of their layers as well.
    "olmo3_yarn": _even(
        "olmo3", 24, layer_types=["full_attention"] * 3, attention_bias=True, tie_word_embeddings=True,
        rope_scaling=_new("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    # Of the two sets of factors, a row's length chooses.
    "phi3_longrope": _even("phi3", 24, **_LONG, original_max_position_embeddings=16),
    "phi3_longrope_short": _even(
        "phi3", 24, **_LONG, max_position_embeddings=128, original_max_position_embeddings=64
    ),
    "gpt_oss": _case(
        "gpt_oss", **_OSS, sliding_window=7, attention_bias=True, rope_theta=1000.0, swiglu_limit=7.0,
        rope_scaling=_new(
            "yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0,
            truncate=False,
        ),
    ),
    "gpt_oss_pattern": _case(
        "gpt_oss", **_OSS | _MQA, sliding_window=5, tie_word_embeddings=True, rope_parameters=_new("default"),
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "smollm3": _case(
        "smollm3", rope_theta=5000.0, no_rope_layers=[1, 0, 1], tie_word_embeddings=True, mlp_bias=True,
    ),
    "smollm3_windows": _even(
        "smollm3", 24, attention_bias=True, use_sliding_window=True, sliding_window=6,
        no_rope_layer_interval=2, tie_word_embeddings=False,
        rope_scaling=_new("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "exaone4": _case(
        "exaone4", sliding_window=6, sliding_window_pattern="LLLG", rope_scaling=_EXAONE_LLAMA_3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "exaone4_full": _case(
        "exaone4", **_MQA, sliding_window=None, tie_word_embeddings=True, rope_theta=1000.0,
        layer_types=["full_attention"] * 3,
    ),
    "seed_oss": _case(
        "seed_oss", attention_bias=True, attention_out_bias=False, mlp_bias=True, rope_theta=1000.0
    ),
    "seed_oss_out": _case(
        "seed_oss", **_MQA, attention_bias=False, attention_out_bias=True, tie_word_embeddings=True,
    ),
    "ernie4_5": _case("ernie4_5", use_bias=True, rope_theta=1000.0, tie_word_embeddings=True),
    "glm": _case("glm", attention_bias=True, partial_rotary_factor=0.5, rope_theta=1000.0),
    "glm4": _case("glm4", attention_bias=True, partial_rotary_factor=0.5, rope_theta=1000.0),
    "glm4_yarn": _case(
        "glm4", **_MQA, attention_bias=False, tie_word_embeddings=True,
        rope_parameters=_new(
            "yarn", factor=4.0, original_max_position_embeddings=16, partial_rotary_factor=0.5
        ),
    ),
    "ministral3": _case(
        "ministral3", sliding_window=None,
        rope_parameters=_new(
            "yarn", factor=4.0, original_max_position_embeddings=8, beta_fast=4.0, beta_slow=1.0, mscale=1.0,
            mscale_all_dim=1.0, llama_4_scaling_beta=0.6,
        ),
    ),
    "ministral3_window": _case(
        "ministral3", **_MQA, sliding_window=9, tie_word_embeddings=True,
        rope_parameters=_new(
            "default", original_max_position_embeddings=16, llama_4_scaling_beta=0.4
        ),
    ),
    "glm4_moe": _case(
        "glm4_moe", **_ROUTED, n_group=3, topk_group=2, norm_topk_prob=True, first_k_dense_replace=1,
        attention_bias=True, use_qk_norm=True, partial_rotary_factor=0.5, rope_theta=1000.0,
    ),
    "glm4_moe_plain": _case(
        "glm4_moe", **_MQA, **_ROUTED, n_group=1, topk_group=1, norm_topk_prob=False, use_qk_norm=False,
        first_k_dense_replace=0, partial_rotary_factor=0.5, tie_word_embeddings=True,
    ),
    "minimax_m2": _case(
        "minimax_m2", num_local_experts=5, num_experts_per_tok=2, rope_theta=5000.0,
        rotary_dim=4, partial_rotary_factor=0.5,
    ),
    "qwen3_5_text": _case("qwen3_5_text", **_LINEAR, linear_num_key_heads=2, **_PARTIAL)
    | {"num_hidden_layers": 4},
    "qwen3_5_moe_text": _case(
        "qwen3_5_moe_text", **_LINEAR, **_EXPERTS, linear_num_key_heads=4, shared_expert_intermediate_size=10,
        layer_types=["full_attention", "linear_attention", "linear_attention"], **_PARTIAL,
        tie_word_embeddings=True,
    ),
    "granite": _even(
        "granite", 24, **_GRANITE, attention_bias=True, mlp_bias=True, rope_theta=1000.0,
        tie_word_embeddings=True,
    ),
    "granitemoehybrid": _even(
        "granitemoehybrid", 24, **_GRANITE, **_GRANITE_STATE, num_local_experts=5, num_experts_per_tok=2,
        shared_intermediate_size=10, position_embedding_type="nope",
        layer_types=["mamba", "attention", "mamba"],
    ),
    "granitemoehybrid_dense": _even(
        "granitemoehybrid", 24, **_GRANITE, **_GRANITE_STATE, num_local_experts=0,
        shared_intermediate_size=26, position_embedding_type="rope", rope_theta=1000.0,
        layer_types=["attention", "mamba", "attention"], tie_word_embeddings=True,
    ),
    "lfm2": _even(
        "lfm2", 24, norm_eps=1e-4, conv_L_cache=3, conv_bias=False, block_auto_adjust_ff_dim=True,
        block_multiple_of=4, block_ffn_dim_multiplier=1.1, full_attn_idxs=[1], rope_theta=1000.0,
        tie_word_embeddings=True,
    ),
    "lfm2_bias": _even(
        "lfm2", 24, **_THREE, norm_eps=1e-4, conv_L_cache=4, conv_bias=True, block_auto_adjust_ff_dim=False,
        layer_types=["full_attention", "conv", "conv"], tie_word_embeddings=False,
    ),
    "glm4_moe_lite": _case(
        "glm4_moe_lite", **_MLA | {"q_lora_rank": 10}, **_ROUTED, n_group=1, topk_group=1,
        norm_topk_prob=True, mlp_layer_types=["dense", "dense", "sparse"], rope_theta=1000.0,
    ),
    "gemma4_text": _gemma_4(
        5, [1, 4], hidden_size_per_layer_input=6, vocab_size_per_layer_input=80, num_kv_shared_layers=2,
        use_double_wide_mlp=True, attention_k_eq_v=False,
    ),
    "gemma4_experts": _gemma_4(
        3, [1, 2], hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=2,
        enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=12,
        final_logit_softcapping=4.0,
    ),
    "gemma4_unified_text": _gemma_4(
        4, [3], attention_k_eq_v=True, num_global_key_value_heads=1, tie_word_embeddings=False,
        use_bidirectional_attention="vision",
    ) | {"model_type": "gemma4_unified_text"},
    "cohere2": _even(
        "cohere2", 24, layer_norm_eps=1e-4, logit_scale=0.5, sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        attention_bias=True, rope_theta=1000.0, tie_word_embeddings=True,
    ) | {"num_hidden_layers": 4},
    "llama4_text": _case(
        "llama4_text", **_WHOLE, intermediate_size_mlp=26, num_local_experts=4, num_experts_per_tok=2,
        attention_chunk_size=7, no_rope_layer_interval=3, floor_scale=5, attn_scale=0.4, use_qk_norm=True,
        interleave_moe_layer_step=2, rope_scaling=_EXAONE_LLAMA_3 | {"rope_theta": 1000.0},
    ) | {"num_hidden_layers": 4},
    "llama4_plain": _case(
        "llama4_text", **_WHOLE, intermediate_size_mlp=26, num_local_experts=3, num_experts_per_tok=1,
        attention_chunk_size=16, no_rope_layers=[1, 0, 1], attn_temperature_tuning=False, use_qk_norm=False,
        interleave_moe_layer_step=1, rope_theta=1000.0, tie_word_embeddings=True,
    ),
    "lfm2_moe": _even(
        "lfm2_moe", 24, norm_eps=1e-4, conv_L_cache=3, conv_bias=False, num_dense_layers=1, num_experts=5,
        num_experts_per_tok=2, moe_intermediate_size=12, use_expert_bias=True, norm_topk_prob=True,
        routed_scaling_factor=1.3, layer_types=["conv", "full_attention", "conv"], rope_theta=1000.0,
        tie_word_embeddings=True,
    ),
    "ernie4_5_moe": _even(
        "ernie4_5_moe", 24, moe_num_experts=5, moe_k=2, moe_intermediate_size=12, moe_num_shared_experts=2,
        moe_layer_start_index=1, moe_layer_end_index=-1, moe_layer_interval=1, rope_theta=1000.0,
        use_bias=False, tie_word_embeddings=True,
    ),
    "bamba": _even(
        "bamba", 24, **_GRANITE_STATE, attn_layer_indices=[1], mlp_bias=True, attention_bias=True,
        rope_theta=1000.0, tie_word_embeddings=False,
    ),
    "jamba": _even(
        "jamba", 24, num_experts=4, num_experts_per_tok=2, expert_layer_period=2, expert_layer_offset=1,
        attn_layer_period=3, attn_layer_offset=1, mamba_d_state=5, mamba_d_conv=4, mamba_expand=2,
        mamba_dt_rank=7, use_mamba_kernels=False, tie_word_embeddings=False,
    ),
    "nemotron_h": _nemotron_h(
        "ME*E-", n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=12, moe_latent_size=10,
        moe_shared_expert_intermediate_size=14, routed_scaling_factor=1.7, norm_topk_prob=True,
    ),
    "nemotron_h_dense": _nemotron_h("M-*M", mlp_bias=True, tie_word_embeddings=True),
    "deepseek_v32": _case(
        "deepseek_v32", **_MLA | {"q_lora_rank": 10}, **_ROUTED, n_group=3, topk_group=2, norm_topk_prob=True,
        first_k_dense_replace=1, index_topk=64, index_head_dim=6, index_n_heads=3, rope_theta=1000.0,
    ),
    "glm_moe_dsa": _case(
        "glm_moe_dsa", **_MLA | {"q_lora_rank": 10}, **_ROUTED, n_group=1, topk_group=1, norm_topk_prob=True,
        first_k_dense_replace=1, index_topk=64, index_head_dim=6, index_n_heads=3, rope_theta=1000.0,
        indexer_types=["full", "shared", "full"],
    ),
    "gemma3n_text": _case(
        "gemma3n_text", **_WHOLE, hidden_size_per_layer_input=6, vocab_size_per_layer_input=80,
        num_kv_shared_layers=2, sliding_window=6, hidden_activation="gelu_pytorch_tanh",
        layer_types=[f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
        altup_num_inputs=3, laurel_rank=5, activation_sparsity_pattern=[0.8, 0.0, 0.6, 0.0, 0.0],
        final_logit_softcapping=4.0, rope_theta=5000.0, rope_local_base_freq=500.0,
    ) | {"num_hidden_layers": 5, "intermediate_size": [28, 28, 28, 20, 20]},
    "gemma3n_plain": _case(
        "gemma3n_text", **_WHOLE, hidden_size_per_layer_input=5, vocab_size_per_layer_input=80,
        num_kv_shared_layers=0, sliding_window=9, hidden_activation="gelu_pytorch_tanh",
        altup_num_inputs=2, laurel_rank=4, tie_word_embeddings=False, rope_theta=1000.0,
        rope_local_base_freq=500.0, attention_bias=True,
    ) | {"num_hidden_layers": 5},
    "falcon_h1": _falcon_h1(mamba_n_groups=2, mamba_rms_norm=True, mamba_norm_before_gate=False),
    "falcon_h1_plain": _falcon_h1(
        mamba_n_groups=1, mamba_rms_norm=False, tie_word_embeddings=True, rope_theta=1000.0,
    ),
    "falcon_h1_norm_first": _falcon_h1(mamba_n_groups=3, mamba_rms_norm=True, mamba_norm_before_gate=True),
    # So many index heads that none of them often sees nothing: torch picks among equal scores by no rule.
    "deepseek_v32_picks": _case(
        "deepseek_v32", **_MLA | {"q_lora_rank": 10}, **_ROUTED, n_group=3, topk_group=2, norm_topk_prob=True,
        first_k_dense_replace=1, index_topk=7, index_head_dim=6, index_n_heads=24,
        rope_scaling=_new(
            "yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0
        ),
    ),
    "glm_moe_dsa_picks": _case(
        "glm_moe_dsa", **_MLA | {"q_lora_rank": 10}, **_ROUTED, n_group=1, topk_group=1, norm_topk_prob=True,
        first_k_dense_replace=1, index_topk=9, index_head_dim=8, index_n_heads=24, rope_theta=1000.0,
        indexer_types=["full", "shared", "full", "shared"],
    ) | {"num_hidden_layers": 4},
    "helium": _case(
        "helium", **_WHOLE | {"head_dim": 4}, attention_bias=True, mlp_bias=True, rope_theta=1000.0,
    ),
}  # fmt: skip
