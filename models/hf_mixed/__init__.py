"""Hugging Face families with several kinds of mixers and experts: one row each, with its peculiarities."""

from __future__ import annotations

from typing import Any

from kvjax.models.hf_family import Family
from kvjax.models.hf_mixed import defaults as of
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

# All published files have a vision tower beside the language model, and transformers writes them so.
_INNER = ("model.language_model", "embed_tokens", "norm")
_GEMMA_4_TENSORS: Any = dict(
    spell=spell_gemma4, windows=in_layers(lambda data, i: (i + 1) % 6 != 0), local_rope="each",
    partial_rotary=True, activation="hidden_activation",
    ignored=("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder."),
)  # fmt: skip

MIXED: dict[str, Family] = {
    "mixtral": Family(
        "MixtralForCausalLM",
        of.COMMON | {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 1e6}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8}
        | {"sliding_window": None},
        read_mixtral, write_mixtral, mixtral, windows=IN_ALL_LAYERS,
        title="Mixtral", special="experts",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        of.COMMON | {"decoder_sparse_step": 1, "norm_topk_prob": False, "num_key_value_heads": 4}
        | {"max_window_layers": 28},
        read_qwen3_moe, write_qwen_experts, qwen3_moe,
        windows=in_layers(lambda data, i: i >= data["max_window_layers"], switch="use_sliding_window"),
        title="Qwen 3 with experts", special="experts",
    ),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", of.DEEPSEEK, read_deepseek, write_deepseek, deepseek,
        title="DeepSeek-V2", special="latents (MLA); experts",
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        of.DEEPSEEK | {"max_position_embeddings": 4096, "first_k_dense_replace": 3, "norm_topk_prob": True}
        | {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
        read_deepseek, write_deepseek, deepseek, more_layers=True, within=("kimi_k2", "kimi_k25"),
        ignored=("vision_tower.", "mm_projector."),
        title="DeepSeek-V3 and R1, Kimi K2 (text)",
        special="latents (MLA); experts; tensors that predict further tokens are not read",
    ),
    "deepseek_v32": Family(
        "DeepseekV32ForCausalLM", of.DEEPSEEK_INDEXED, read_indexed, write_indexed, indexed,
        spell_glm4_moe_lite, more_layers=True, title="DeepSeek-V3.2",
        special="latents (MLA); an indexer picks the tokens of each query; experts",
    ),
    "glm_moe_dsa": Family(
        "GlmMoeDsaForCausalLM", of.GLM_INDEXED, read_indexed, write_indexed, indexed, spell_glm4_moe_lite,
        more_layers=True, title="GLM-5",
        special="latents (MLA); indexers of some layers pick the tokens of each query; experts",
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM", of.GLM_LITE, read_deepseek, write_glm4_moe_lite, deepseek,
        spell_glm4_moe_lite, more_layers=True,
        title="GLM-4.7-Flash", special="latents (MLA); experts",
    ),
    "mamba2": Family(
        "Mamba2ForCausalLM", of.MAMBA_2, read_mamba2, write_mamba2, mamba2,
        top=("backbone", "embeddings", "norm_f"),
        title="Mamba-2", special="states alone",
    ),
    "kimi_linear": Family(
        "KimiLinearForCausalLM", of.KIMI, read_kimi_linear, write_kimi_linear, kimi_linear, more_layers=True,
        title="Kimi Linear",
        special="delta-rule states in three of four layers, latents without rotation in the others",
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM", of.GLM, read_glm4_moe, write_glm4_moe, glm4_moe, partial_rotary=True,
        more_layers=True,
        title="GLM-4.5 to 4.7", special="experts; tensors that predict further tokens are not read",
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM", of.MINIMAX, read_minimax_m2, write_minimax_m2, minimax_m2, spell_minimax_m2,
        partial_rotary=True, more_layers=True,
        title="MiniMax-M2", special="experts; norms over all heads together",
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM", of.LFM_2, read_lfm2, write_lfm2, lfm2, spell_lfm2,
        top=("model", "embed_tokens", "embedding_norm"),
        title="LFM2 (dense)", special="short convolutions, and attention in few layers",
    ),
    "rwkv7": Family(
        "RWKV7ForCausalLM", of.RWKV_7, read_rwkv7, write_rwkv7, rwkv7, spell_rwkv7,
        top=("model", "embeddings", "norm"), side_by_side=2, title="RWKV-7",
        special="states alone; time mix and channel mix count as two layers; also its authors' .pth files",
    ),
    "falcon_h1": Family(
        "FalconH1ForCausalLM", of.FALCON_H1, read_falcon_h1, write_falcon_h1, falcon_h1, spell_falcon_h1,
        top=("model", "embed_tokens", "final_layernorm"), side_by_side=2,
        title="Falcon-H1",
        special="Mamba-2 and attention side by side, which count as two layers; multipliers",
    ),
    "gemma3n_text": Family(
        "Gemma3nForCausalLM", of.GEMMA_3N, read_gemma3n, write_gemma3n, gemma3n, spell_gemma3n,
        windows=in_layers(lambda data, i: (i + 1) % 5 != 0), local_rope="own", activation="hidden_activation",
        within=("gemma3n",), ignored=("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio."),
        title="Gemma 3n (text)",
        special=(
            "windows in four of five layers; upper layers read the keys and values of lower ones; per-layer "
            "embeddings; a hidden state of four streams; sparse gates"
        ),
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM", of.GEMMA_4, read_gemma4, write_gemma4, gemma4, within=("gemma4",),
        **_GEMMA_4_TENSORS,
        title="Gemma 4 (text)",
        special=(
            "two sizes of heads; windows in five of six layers; full layers that store keys and values as one"
            " array, or upper layers that read the keys and values of lower ones; per-layer embeddings; "
            "experts beside an MLP"
        ),
    ),
    "gemma4_unified_text": Family(
        "Gemma4UnifiedForCausalLM", of.GEMMA_4_UNIFIED, read_gemma4, write_gemma4, gemma4,
        within=("gemma4_unified",), **_GEMMA_4_TENSORS,
        title="Gemma 4 unified (text)", special="as Gemma 4, without per-layer embeddings and experts",
    ),
    "llama4_text": Family(
        "Llama4ForCausalLM", of.LLAMA_4, read_llama4, write_llama4, llama4, spell_llama4, windows=CHUNKS,
        within=("llama4",), ignored=("vision_model.", "multi_modal_projector."),
        title="Llama 4 (text)",
        special=(
            "attention within chunks in three of four layers; the others do not rotate, and their queries "
            "grow with their positions; experts"
        ),
    ),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM", of.LFM_2_MOE, read_lfm2_moe, write_lfm2_moe, lfm2, spell_lfm2_moe,
        top=("model", "embed_tokens", "embedding_norm"),
        title="LFM2 with experts", special="short convolutions, and attention in few layers; experts",
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM", of.ERNIE_MOE, read_ernie_moe, write_ernie_moe, ernie_moe, spell_ernie_moe,
        ignored=("mtp_",),
        title="ERNIE 4.5 with experts", special="experts",
    ),
    "bamba": Family(
        "BambaForCausalLM", of.BAMBA, read_bamba, write_bamba, bamba, spell_bamba, partial_rotary=True,
        top=("model", "embed_tokens", "final_layernorm"),
        title="Bamba", special="Mamba-2, and attention in few layers",
    ),
    "jamba": Family(
        "JambaForCausalLM", of.JAMBA, read_jamba, write_jamba, jamba,
        top=("model", "embed_tokens", "final_layernorm"),
        title="Jamba", special="Mamba, and attention without rotation in few layers; experts",
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM", of.NEMOTRON_H, read_nemotron_h, write_nemotron_h, nemotron_h,
        spell=spell_nemotron_h, activation="mlp_hidden_act", top=("backbone", "embeddings", "norm_f"),
        ignored=("mtp.",),
        title="Nemotron-H and Nemotron 3",
        special="each layer is Mamba-2, attention without rotation, experts or an MLP alone",
    ),
    "granite": Family("GraniteForCausalLM", of.GRANITE, read_granite, write_granite,
        title="Granite 3 (dense)", special="multipliers",
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM", of.GRANITE_4, read_granite_4, write_granite_4, granite_4,
        spell_granite_4,
        title="Granite 4", special="Mamba-2, and attention without rotation in few layers; experts",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM", of.OSS, read_gpt_oss, write_gpt_oss, gpt_oss,
        windows=in_layers(lambda data, i: (i + 1) % 2 != 0),
        title="gpt-oss", special="learned sinks; windows in every other layer; MXFP4 experts are read",
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM", of.NEXT, read_qwen3_next, write_qwen3_next, qwen3_next, partial_rotary=True,
        ignored=("mtp.",),
        title="Qwen3-Next", special="delta-rule states in three of four layers; gated attention; experts",
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM", of.QWEN_3_5, read_qwen3_5, write_qwen3_5, qwen3_next, partial_rotary=True,
        within=("qwen3_5",), top=_INNER, ignored=("visual.", "mtp."),
        title="Qwen 3.5 (text)", special="delta-rule states in three of four layers; gated attention",
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM", of.QWEN_3_5 | of.NEXT, read_qwen3_next, write_qwen3_next, qwen3_next,
        spell_qwen3_5_moe, partial_rotary=True, within=("qwen3_5_moe",), top=_INNER,
        ignored=("visual.", "mtp."),
        title="Qwen 3.5 with experts (text)",
        special="delta-rule states in three of four layers; gated attention; experts",
    ),
}  # fmt: skip
