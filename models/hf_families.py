"""Every family of Hugging Face checkpoints that is loaded and saved, by its `model_type`."""

from __future__ import annotations

from typing import Any

from kvjax.models.config import Config
from kvjax.models.hf_family import Family, Json
from kvjax.models.hf_mixed import MIXED
from kvjax.models.hf_numbers import int_if_whole
from kvjax.models.hf_windows import IN_ALL_LAYERS, in_layers
from kvjax.ops.base.rope import Rope


def _biased(data: Json, **more: Any) -> dict[str, Any]:
    bias = bool(data.get("attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias, **more}


def _llama(data: Json, rope: Rope) -> dict[str, Any]:
    return _biased(data, mlp_bias=bool(data.get("mlp_bias", False)))


def _plain(data: Json, rope: Rope) -> dict[str, Any]:
    return {}


def _qwen2(data: Json, rope: Rope) -> dict[str, Any]:
    return {"qkv_bias": True}


def _qwen3(data: Json, rope: Rope) -> dict[str, Any]:
    return _biased(data, qk_norm="head")


def _olmo(data: Json, rope: Rope) -> dict[str, Any]:
    return _biased(data, norms="post", qk_norm="full")


def _gemma2(data: Json, rope: Rope) -> dict[str, Any]:
    return _biased(
        data,
        norms="both",
        norm_offset=1.0,
        embed_scale=float(data["hidden_size"]) ** 0.5,
        query_scale=float(data["query_pre_attn_scalar"]) ** -0.5,
        attention_softcap=data.get("attn_logit_softcapping"),
        logit_softcap=data.get("final_logit_softcapping"),
    )


def _gemma3(data: Json, rope: Rope) -> dict[str, Any]:
    return _gemma2(data, rope) | {"qk_norm": "head"}


def _write_gemma(config: Config) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": int_if_whole(round(config.scale**-2, 6)),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
    }


_SIZES = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "rope_theta": 10000.0}
_QWEN = _SIZES | {"max_position_embeddings": 32768, "max_window_layers": 28}
_QWEN_WINDOWS = in_layers(lambda data, i: i >= data["max_window_layers"], switch="use_sliding_window")
_GEMMA = _SIZES | {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
}
_GEMMA_3 = {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window_pattern": 6,
}
_GEMMA_WINDOWS = in_layers(lambda data, i: (i + 1) % data.get("sliding_window_pattern", 2) != 0)
_MISTRAL = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM", _SIZES, _llama, write=lambda config: {"mlp_bias": config.mlp_bias}
    ),
    "mistral": Family("MistralForCausalLM", _SIZES | _MISTRAL, _plain, windows=IN_ALL_LAYERS),
    "qwen2": Family("Qwen2ForCausalLM", _QWEN, _qwen2, windows=_QWEN_WINDOWS),
    "qwen3": Family("Qwen3ForCausalLM", _QWEN | {"head_dim": 128}, _qwen3, windows=_QWEN_WINDOWS),
    "gemma2": Family(
        "Gemma2ForCausalLM", _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        _gemma2, _write_gemma, windows=_GEMMA_WINDOWS, activation="hidden_activation",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", _GEMMA | _GEMMA_3, _gemma3, _write_gemma,
        windows=_GEMMA_WINDOWS, local_rope="own", activation="hidden_activation", within="gemma3",
        ignored=("vision_tower.", "multi_modal_projector."),
    ),
    "phi3": Family(
        "Phi3ForCausalLM", _SIZES | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}, _plain,
        windows=IN_ALL_LAYERS, partial_rotary=True,
        fused={"self_attn.qkv_proj.weight": ("q", "k", "v"), "mlp.gate_up_proj.weight": ("gate", "up")},
    ),
    "olmo2": Family("Olmo2ForCausalLM", _SIZES | {"rms_norm_eps": 1e-5}, _olmo),
    # Only full layers rotate scaled, as in the paper (arXiv:2512.13961); in transformers 5.2 all layers do.
    "olmo3": Family(
        "Olmo3ForCausalLM", _SIZES | {"rms_norm_eps": 1e-5, "sliding_window": 4096}, _olmo,
        windows=in_layers(lambda data, i: (i + 1) % 4 != 0), local_rope="unscaled",
    ),
    **MIXED,
}  # fmt: skip
"""Adding one here, and its cases to tests/models/hf_cases.py, adds a family."""

SUPPORTED = (*FAMILIES, *(row.within for row in FAMILIES.values() if row.within))
"""Every `model_type` that can be loaded; of "gemma3" the language model alone."""
