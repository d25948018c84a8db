"""Hugging Face families with several kinds of mixers and experts: one row each, with its peculiarities."""

from __future__ import annotations

import math
from typing import Any

from kvjax.models.hf_family import Family
from kvjax.models.hf_mixed.deepseek import (
    deepseek,
    indexed,
    read_deepseek,
    read_indexed,
    spell_glm4_moe_lite,
    write_deepseek,
    write_glm4_moe_lite,
    write_indexed,
)
from kvjax.models.hf_mixed.falcon_h1 import (
    falcon_h1,
    read_falcon_h1,
    spell_falcon_h1,
    write_falcon_h1,
)
from kvjax.models.hf_mixed.gemma3n import gemma3n, read_gemma3n, spell_gemma3n, write_gemma3n
from kvjax.models.hf_mixed.gemma4 import gemma4, read_gemma4, spell_gemma4, write_gemma4
from kvjax.models.hf_mixed.glm4_moe import glm4_moe, read_glm4_moe, write_glm4_moe
from kvjax.models.hf_mixed.gpt_oss import gpt_oss, read_gpt_oss, write_gpt_oss
from kvjax.models.hf_mixed.granite import (
    granite_4,
    read_granite,
    read_granite_4,
    spell_granite_4,
    write_granite,
    write_granite_4,
)
from kvjax.models.hf_mixed.hybrids import (
    bamba,
    jamba,
    read_bamba,
    read_jamba,
    spell_bamba,
    write_bamba,
    write_jamba,
)
from kvjax.models.hf_mixed.kimi_linear import kimi_linear, read_kimi_linear, write_kimi_linear
from kvjax.models.hf_mixed.lfm2 import (
    lfm2,
    read_lfm2,
    read_lfm2_moe,
    spell_lfm2,
    spell_lfm2_moe,
    write_lfm2,
    write_lfm2_moe,
)
from kvjax.models.hf_mixed.llama4 import CHUNKS, llama4, read_llama4, spell_llama4, write_llama4
from kvjax.models.hf_mixed.mamba2 import mamba2, read_mamba2, write_mamba2
from kvjax.models.hf_mixed.moe import (
    ernie_moe,
    minimax_m2,
    mixtral,
    qwen3_moe,
    read_ernie_moe,
    read_minimax_m2,
    read_mixtral,
    read_qwen3_moe,
    spell_ernie_moe,
    spell_minimax_m2,
    write_ernie_moe,
    write_minimax_m2,
    write_mixtral,
    write_qwen_experts,
)
from kvjax.models.hf_mixed.nemotron_h import (
    nemotron_h,
    read_nemotron_h,
    spell_nemotron_h,
    write_nemotron_h,
)
from kvjax.models.hf_mixed.qwen3_next import (
    qwen3_next,
    read_qwen3_5,
    read_qwen3_next,
    spell_qwen3_5_moe,
    write_qwen3_5,
    write_qwen3_next,
)
from kvjax.models.hf_mixed.rwkv7 import read_rwkv7, rwkv7, spell_rwkv7, write_rwkv7
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
_YARN_32 = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_OSS = _COMMON | {
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "head_dim": 64,
    "num_key_value_heads": 8, "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4,
    "swiglu_limit": 7.0, "rope_parameters": _YARN_32,
}  # fmt: skip
_QWEN_3_5 = _COMMON | {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "head_dim": 256, "partial_rotary_factor": 0.25,
    "num_key_value_heads": 4,
}  # fmt: skip
# All published files have a vision tower beside the language model, and transformers writes them so.
_INNER = ("model.language_model", "embed_tokens", "norm")
_GLM = _COMMON | {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_GRANITE = _COMMON | {
    "max_position_embeddings": 2048, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
    "residual_multiplier": 1.0, "attention_multiplier": 1.0,
}  # fmt: skip
_GRANITE_4 = _GRANITE | {
    "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024,
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto",
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "intermediate_size": 11008,
}  # fmt: skip
_LFM_2 = _COMMON | {
    "max_position_embeddings": 128000, "rope_theta": 1e6, "num_key_value_heads": 8, "norm_eps": 1e-5,
    "conv_L_cache": 3, "conv_bias": False, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True, "tie_word_embeddings": True,
}  # fmt: skip
_GLM_LITE = _COMMON | {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1,
}  # fmt: skip
_DEEPSEEK_INDEXED = _DEEPSEEK | {
    "max_position_embeddings": 163840, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "n_shared_experts": 1,
    "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64,
}  # fmt: skip
_GLM_INDEXED = _DEEPSEEK_INDEXED | {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "n_group": 1, "topk_group": 1,
    "index_n_heads": 32,
}  # fmt: skip
_MINIMAX = _COMMON | {
    "max_position_embeddings": 196608, "rope_theta": 5e6, "head_dim": 128, "num_key_value_heads": 8,
    "num_local_experts": 256, "num_experts_per_tok": 8,
}  # fmt: skip
_LFM_2_MOE = {n: x for n, x in _LFM_2.items() if not n.startswith("block_")} | {
    "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2, "num_experts": 32,
    "num_experts_per_tok": 4, "use_expert_bias": True, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
}  # fmt: skip
_ERNIE_MOE = _COMMON | {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 500000.0, "num_key_value_heads": 4,
    "tie_word_embeddings": True, "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64,
    "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}  # fmt: skip
_BAMBA = _COMMON | {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 262144, "num_key_value_heads": 8, "mamba_n_heads": 128,
    "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}  # fmt: skip
_JAMBA = _COMMON | {
    "max_position_embeddings": 262144, "num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2,
    "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 8, "attn_layer_offset": 4,
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": "auto",
    "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip
_LLAMA_4 = _COMMON | {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "head_dim": 128, "num_key_value_heads": 8,
    "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 16,
    "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "use_qk_norm": True,
    "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "attn_temperature_tuning": True,
    "floor_scale": 8192, "attn_scale": 0.1, "rope_theta": 500000.0,
}  # fmt: skip
_NEMOTRON_H = _COMMON | {
    "max_position_embeddings": 4096, "head_dim": 128, "num_key_value_heads": 8, "intermediate_size": 21504,
    "mlp_hidden_act": "relu2", "mlp_bias": False, "use_bias": False, "use_conv_bias": True,
    "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "n_group": 1,
}  # fmt: skip
_RWKV_7 = {
    "hidden_ratio": 4, "head_dim": 64, "decay_low_rank_dim": 64, "gate_low_rank_dim": 128,
    "a_low_rank_dim": 64, "v_low_rank_dim": 16, "hidden_act": "sqrelu", "max_position_embeddings": 2**20,
    "norm_first": True, "norm_bias": True, "norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}  # fmt: skip
_FALCON_H1 = _COMMON | {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "num_key_value_heads": 8, "mamba_d_ssm": 1024,
    "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_norm_before_gate": True,
    "mamba_rms_norm": False, "time_step_limit": (0.0, math.inf), "lm_head_multiplier": 1.0,
    "embedding_multiplier": 1.0, "key_multiplier": 1.0, "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0,
}  # fmt: skip
_GEMMA_3N = _COMMON | {
    "vocab_size": 262400, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "sliding_window": 512,
    "tie_word_embeddings": True, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "final_logit_softcapping": 30.0, "num_kv_shared_layers": 15, "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144, "altup_active_idx": 0, "altup_correct_scale": True,
    "altup_num_inputs": 4, "laurel_rank": 64,
}  # fmt: skip
_GEMMA_4 = _COMMON | {
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
_GEMMA_4_UNIFIED = _GEMMA_4 | {
    "max_position_embeddings": 262144, "sliding_window": 1024, "hidden_size_per_layer_input": 0,
}  # fmt: skip
_GEMMA_4_TENSORS: Any = dict(
    spell=spell_gemma4, windows=in_layers(lambda data, i: (i + 1) % 6 != 0), local_rope="each",
    partial_rotary=True, activation="hidden_activation",
    ignored=("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder."),
)  # fmt: skip

MIXED: dict[str, Family] = {
    "mixtral": Family(
        "MixtralForCausalLM",
        _COMMON | {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 1e6}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8}
        | {"sliding_window": None},
        read_mixtral, write_mixtral, mixtral, windows=IN_ALL_LAYERS,
        title="Mixtral", special="experts",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _COMMON | {"decoder_sparse_step": 1, "norm_topk_prob": False, "num_key_value_heads": 4}
        | {"max_window_layers": 28},
        read_qwen3_moe, write_qwen_experts, qwen3_moe,
        windows=in_layers(lambda data, i: i >= data["max_window_layers"], switch="use_sliding_window"),
        title="Qwen 3 with experts", special="experts",
    ),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", _DEEPSEEK, read_deepseek, write_deepseek, deepseek,
        title="DeepSeek-V2", special="latents (MLA); experts",
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        _DEEPSEEK | {"max_position_embeddings": 4096, "first_k_dense_replace": 3, "norm_topk_prob": True}
        | {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
        read_deepseek, write_deepseek, deepseek, more_layers=True, within=("kimi_k2", "kimi_k25"),
        ignored=("vision_tower.", "mm_projector."),
        title="DeepSeek-V3 and R1, Kimi K2 (text)",
        special="latents (MLA); experts; tensors that predict further tokens are not read",
    ),
    "deepseek_v32": Family(
        "DeepseekV32ForCausalLM", _DEEPSEEK_INDEXED, read_indexed, write_indexed, indexed,
        spell_glm4_moe_lite, more_layers=True, title="DeepSeek-V3.2",
        special="latents (MLA); an indexer picks the tokens of each query; experts",
    ),
    "glm_moe_dsa": Family(
        "GlmMoeDsaForCausalLM", _GLM_INDEXED, read_indexed, write_indexed, indexed, spell_glm4_moe_lite,
        more_layers=True, title="GLM-5",
        special="latents (MLA); indexers of some layers pick the tokens of each query; experts",
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM", _GLM_LITE, read_deepseek, write_glm4_moe_lite, deepseek,
        spell_glm4_moe_lite, more_layers=True,
        title="GLM-4.7-Flash", special="latents (MLA); experts",
    ),
    "mamba2": Family(
        "Mamba2ForCausalLM", _MAMBA_2, read_mamba2, write_mamba2, mamba2,
        top=("backbone", "embeddings", "norm_f"),
        title="Mamba-2", special="states alone",
    ),
    "kimi_linear": Family(
        "KimiLinearForCausalLM", _KIMI, read_kimi_linear, write_kimi_linear, kimi_linear, more_layers=True,
        title="Kimi Linear",
        special="delta-rule states in three of four layers, latents without rotation in the others",
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM", _GLM, read_glm4_moe, write_glm4_moe, glm4_moe, partial_rotary=True,
        more_layers=True,
        title="GLM-4.5 to 4.7", special="experts; tensors that predict further tokens are not read",
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM", _MINIMAX, read_minimax_m2, write_minimax_m2, minimax_m2, spell_minimax_m2,
        partial_rotary=True, more_layers=True,
        title="MiniMax-M2", special="experts; norms over all heads together",
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM", _LFM_2, read_lfm2, write_lfm2, lfm2, spell_lfm2,
        top=("model", "embed_tokens", "embedding_norm"),
        title="LFM2 (dense)", special="short convolutions, and attention in few layers",
    ),
    "rwkv7": Family(
        "RWKV7ForCausalLM", _RWKV_7, read_rwkv7, write_rwkv7, rwkv7, spell_rwkv7,
        top=("model", "embeddings", "norm"), side_by_side=2, title="RWKV-7",
        special="states alone; time mix and channel mix count as two layers; also its authors' .pth files",
    ),
    "falcon_h1": Family(
        "FalconH1ForCausalLM", _FALCON_H1, read_falcon_h1, write_falcon_h1, falcon_h1, spell_falcon_h1,
        top=("model", "embed_tokens", "final_layernorm"), side_by_side=2,
        title="Falcon-H1",
        special="Mamba-2 and attention side by side, which count as two layers; multipliers",
    ),
    "gemma3n_text": Family(
        "Gemma3nForCausalLM", _GEMMA_3N, read_gemma3n, write_gemma3n, gemma3n, spell_gemma3n,
        windows=in_layers(lambda data, i: (i + 1) % 5 != 0), local_rope="own", activation="hidden_activation",
        within=("gemma3n",), ignored=("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio."),
        title="Gemma 3n (text)",
        special=(
            "windows in four of five layers; upper layers read the keys and values of lower ones; per-layer "
            "embeddings; a hidden state of four streams; sparse gates"
        ),
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM", _GEMMA_4, read_gemma4, write_gemma4, gemma4, within=("gemma4",),
        **_GEMMA_4_TENSORS,
        title="Gemma 4 (text)",
        special=(
            "two sizes of heads; windows in five of six layers; full layers that store keys and values as one"
            " array, or upper layers that read the keys and values of lower ones; per-layer embeddings; "
            "experts beside an MLP"
        ),
    ),
    "gemma4_unified_text": Family(
        "Gemma4UnifiedForCausalLM", _GEMMA_4_UNIFIED, read_gemma4, write_gemma4, gemma4,
        within=("gemma4_unified",), **_GEMMA_4_TENSORS,
        title="Gemma 4 unified (text)", special="as Gemma 4, without per-layer embeddings and experts",
    ),
    "llama4_text": Family(
        "Llama4ForCausalLM", _LLAMA_4, read_llama4, write_llama4, llama4, spell_llama4, windows=CHUNKS,
        within=("llama4",), ignored=("vision_model.", "multi_modal_projector."),
        title="Llama 4 (text)",
        special=(
            "attention within chunks in three of four layers; the others do not rotate, and their queries "
            "grow with their positions; experts"
        ),
    ),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM", _LFM_2_MOE, read_lfm2_moe, write_lfm2_moe, lfm2, spell_lfm2_moe,
        top=("model", "embed_tokens", "embedding_norm"),
        title="LFM2 with experts", special="short convolutions, and attention in few layers; experts",
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM", _ERNIE_MOE, read_ernie_moe, write_ernie_moe, ernie_moe, spell_ernie_moe,
        ignored=("mtp_",),
        title="ERNIE 4.5 with experts", special="experts",
    ),
    "bamba": Family(
        "BambaForCausalLM", _BAMBA, read_bamba, write_bamba, bamba, spell_bamba, partial_rotary=True,
        top=("model", "embed_tokens", "final_layernorm"),
        title="Bamba", special="Mamba-2, and attention in few layers",
    ),
    "jamba": Family(
        "JambaForCausalLM", _JAMBA, read_jamba, write_jamba, jamba,
        top=("model", "embed_tokens", "final_layernorm"),
        title="Jamba", special="Mamba, and attention without rotation in few layers; experts",
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM", _NEMOTRON_H, read_nemotron_h, write_nemotron_h, nemotron_h, spell_nemotron_h,
        activation="mlp_hidden_act", top=("backbone", "embeddings", "norm_f"), ignored=("mtp.",),
        title="Nemotron-H and Nemotron 3",
        special="each layer is Mamba-2, attention without rotation, experts or an MLP alone",
    ),
    "granite": Family("GraniteForCausalLM", _GRANITE, read_granite, write_granite,
        title="Granite 3 (dense)", special="multipliers",
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM", _GRANITE_4, read_granite_4, write_granite_4, granite_4,
        spell_granite_4,
        title="Granite 4", special="Mamba-2, and attention without rotation in few layers; experts",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM", _OSS, read_gpt_oss, write_gpt_oss, gpt_oss,
        windows=in_layers(lambda data, i: (i + 1) % 2 != 0),
        title="gpt-oss", special="learned sinks; windows in every other layer; MXFP4 experts are read",
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM", _NEXT, read_qwen3_next, write_qwen3_next, qwen3_next, partial_rotary=True,
        ignored=("mtp.",),
        title="Qwen3-Next", special="delta-rule states in three of four layers; gated attention; experts",
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM", _QWEN_3_5, read_qwen3_5, write_qwen3_5, qwen3_next, partial_rotary=True,
        within=("qwen3_5",), top=_INNER, ignored=("visual.", "mtp."),
        title="Qwen 3.5 (text)", special="delta-rule states in three of four layers; gated attention",
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM", _QWEN_3_5 | _NEXT, read_qwen3_next, write_qwen3_next, qwen3_next,
        spell_qwen3_5_moe, partial_rotary=True, within=("qwen3_5_moe",), top=_INNER,
        ignored=("visual.", "mtp."),
        title="Qwen 3.5 with experts (text)",
        special="delta-rule states in three of four layers; gated attention; experts",
    ),
}  # fmt: skip
