"""Every supported family of Hugging Face checkpoints, by its `model_type`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.hf_family import Family, Json
from kvjax.models.hf_mixed import MIXED
from kvjax.models.hf_numbers import int_if_whole
from kvjax.models.hf_ropes import scaling_fields
from kvjax.models.hf_windows import IN_ALL_LAYERS, in_layers
from kvjax.models.mixers.attention import Attention, mixer_of
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


def _write_glm(config: Config) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias}


def _write_gemma(config: Config) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": int_if_whole(round(config.scale**-2, 6)),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
    }


def _turning(flags: Sequence[bool]) -> tuple[Attention, ...]:
    """Attention in every layer, with or without rotation by position."""
    return () if all(flags) else tuple(Attention(rotates=flag) for flag in flags)


def _turns(config: Config) -> list[bool]:
    return [isinstance(word := mixer_of(config, i), Attention) and word.rotates for i in range(config.layers)]


def _given_turns(data: Json) -> list[bool]:
    """Which layers of SmolLM3 rotate; despite its name, the key lists those that do."""
    every, layers = data["no_rope_layer_interval"], data["num_hidden_layers"]
    given = data.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(layers)]
    if len(given) < layers:
        raise InputError(f"no_rope_layers has {len(given)} entries, expected one for each of {layers} layers")
    return [bool(flag) for flag in given[:layers]]


def _smollm3(data: Json, rope: Rope) -> dict[str, Any]:
    return _llama(data, rope) | {"mixers": _turning(_given_turns(data))}


def _write_smollm3(config: Config) -> dict[str, Any]:
    return {"mlp_bias": config.mlp_bias, "no_rope_layers": [int(flag) for flag in _turns(config)]}


def _exaone4(data: Json, rope: Rope) -> dict[str, Any]:
    """If there is a window, layers without a window do not rotate."""
    windows, layers = _EXAONE_WINDOWS.read(data), data["num_hidden_layers"]
    some = data["sliding_window"] is not None
    turning = [not some or bool(windows and windows[i]) for i in range(layers)]
    return {"norms": "post", "qk_norm": "head", "mixers": _turning(turning)}


def _write_exaone4(config: Config) -> dict[str, Any]:
    return {} if config.windows or not all(_turns(config)) else {"sliding_window": None}


def _spell_exaone4(data: Json) -> dict[str, Any]:
    """Since transformers 5.24, a pattern of 0 means no windows."""
    return {"sliding_window_pattern": 1} if data["sliding_window_pattern"] == 0 else {}


def _exaone_slides(data: Json, i: int) -> bool:
    pattern = data["sliding_window_pattern"]
    return pattern[i % len(pattern)] == "L" if isinstance(pattern, str) else (i + 1) % pattern != 0


def _seed_oss(data: Json, rope: Rope) -> dict[str, Any]:
    names = {"qkv_bias": "attention_bias", "o_bias": "attention_out_bias", "mlp_bias": "mlp_bias"}
    return {ours: bool(data.get(theirs)) for ours, theirs in names.items()}


def _write_seed_oss(config: Config) -> dict[str, Any]:
    biases = {"attention_bias": config.qkv_bias, "attention_out_bias": config.o_bias}
    return biases | {"mlp_bias": config.mlp_bias}


def _ernie(data: Json, rope: Rope) -> dict[str, Any]:
    bias = bool(data.get("use_bias"))
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias}


def _cohere2(data: Json, rope: Rope) -> dict[str, Any]:
    """Layers without a window are not rotated."""
    windows, layers = _COHERE_WINDOWS.read(data), data["num_hidden_layers"]
    return _biased(
        data,
        norms="parallel",
        centred=True,
        logit_scale=float(data["logit_scale"]),
        mixers=_turning([bool(windows and windows[i]) for i in range(layers)]),
    )


def _spell_cohere2(data: Json) -> dict[str, Any]:
    return {"rms_norm_eps": data["layer_norm_eps"]}


def _write_cohere2(config: Config) -> dict[str, Any]:
    return {"layer_norm_eps": config.norm_eps, "logit_scale": config.logit_scale}


def _glm(data: Json, rope: Rope) -> dict[str, Any]:
    return {"qkv_bias": bool(data.get("attention_bias"))}


def _glm4(data: Json, rope: Rope) -> dict[str, Any]:
    return _glm(data, rope) | {"norms": "both"}


def _helium(data: Json, rope: Rope) -> dict[str, Any]:
    return {"qkv_bias": bool(data.get("attention_bias")), "mlp_bias": bool(data.get("mlp_bias"))}


def _ministral3(data: Json, rope: Rope) -> dict[str, Any]:
    params = data.get("rope_scaling") or data["rope_parameters"]
    beta = float(params.get("llama_4_scaling_beta") or 0.0)
    original = params.get("original_max_position_embeddings")
    if not beta:
        return {}
    if not original:
        raise InputError(
            "config.json gives llama_4_scaling_beta without original_max_position_embeddings beside it: give "
            "both, or neither"
        )
    return {"mixers": (Attention(query_growth=(beta, int(original))),) * data["num_hidden_layers"]}


def _write_ministral3(config: Config) -> dict[str, Any]:
    word = mixer_of(config, 0)
    assert isinstance(word, Attention)
    scaling = {"rope_theta": config.rope.theta, **scaling_fields(config.rope)}
    if word.query_growth is not None:
        beta, original = word.query_growth
        scaling |= {"llama_4_scaling_beta": beta, "original_max_position_embeddings": original}
    return {"rope_parameters": scaling, "rope_scaling": None}


_VISION = ("vision_tower.", "multi_modal_projector.")
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
_EXAONE_WINDOWS = in_layers(_exaone_slides)
_COHERE_WINDOWS = in_layers(lambda data, i: (i + 1) % data.get("sliding_window_pattern", 4) != 0)
_COHERE = _SIZES | {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GLM = _SIZES | {
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131072,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
_GLM_TENSORS: Any = dict(partial_rotary=True, paired=True, fused={"mlp.gate_up_proj.weight": ("gate", "up")})
_MISTRAL_3 = _SIZES | {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "rope_theta": 1e6,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM", _SIZES, _llama, write=lambda config: {"mlp_bias": config.mlp_bias},
        title="Llama 2 to 3.3",
    ),
    "mistral": Family(
        "MistralForCausalLM", _SIZES | _MISTRAL, _plain, windows=IN_ALL_LAYERS, within=("mistral3",),
        ignored=_VISION,
        title="Mistral and Mistral 3 (text)", special="windows in all layers, or none",
    ),
    "qwen2": Family("Qwen2ForCausalLM", _QWEN, _qwen2, windows=_QWEN_WINDOWS,
        title="Qwen 2 and 2.5", special="windows in upper layers where they are switched on; biases",
    ),
    "qwen3": Family("Qwen3ForCausalLM", _QWEN | {"head_dim": 128}, _qwen3, windows=_QWEN_WINDOWS,
        title="Qwen 3 (dense)", special="norms of queries and keys",
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        _gemma2, _write_gemma, windows=_GEMMA_WINDOWS, activation="hidden_activation",
        title="Gemma 2", special="windows in every other layer; soft caps",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", _GEMMA | _GEMMA_3, _gemma3, _write_gemma,
        windows=_GEMMA_WINDOWS, local_rope="own", activation="hidden_activation", within=("gemma3",),
        ignored=_VISION,
        title="Gemma 3 (text)", special="windows in five of six layers, with a rotation of their own",
    ),
    "phi3": Family(
        "Phi3ForCausalLM", _SIZES | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}, _plain,
        windows=IN_ALL_LAYERS, partial_rotary=True,
        fused={"self_attn.qkv_proj.weight": ("q", "k", "v"), "mlp.gate_up_proj.weight": ("gate", "up")},
        title="Phi-3 and Phi-4", special="LongRoPE; partial rotation",
    ),
    "olmo2": Family("Olmo2ForCausalLM", _SIZES | {"rms_norm_eps": 1e-5}, _olmo,
        title="OLMo 2", special="norms after attention and feed-forward",
    ),
    # Only full layers use the scaled rotation, as in the paper (arXiv:2512.13961); in transformers 5.2 all
    # layers do.
    "olmo3": Family(
        "Olmo3ForCausalLM", _SIZES | {"rms_norm_eps": 1e-5, "sliding_window": 4096}, _olmo,
        windows=in_layers(lambda data, i: (i + 1) % 4 != 0), local_rope="unscaled",
        title="OLMo 3", special="windows in three of four layers, which rotate unscaled",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _SIZES | {"max_position_embeddings": 32768, "rope_theta": 2e6, "num_key_value_heads": 4}
        | {"tie_word_embeddings": True, "no_rope_layer_interval": 4},
        _smollm3, _write_smollm3,
        windows=in_layers(lambda data, i: not _given_turns(data)[i], switch="use_sliding_window"),
        title="SmolLM3", special="no rotation in every fourth layer",
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        _SIZES | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        _exaone4, _write_exaone4, windows=_EXAONE_WINDOWS, spell=_spell_exaone4,
        title="EXAONE 4", special="windows in three of four layers; the others do not rotate",
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        _SIZES | {"max_position_embeddings": 524288, "head_dim": 128, "num_key_value_heads": 8}
        | {"attention_bias": True},
        _seed_oss, _write_seed_oss,
        title="Seed-OSS",
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        _SIZES | {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "head_dim": 128}
        | {"num_key_value_heads": 2, "tie_word_embeddings": True},
        _ernie, write=lambda config: {"use_bias": config.o_bias}, paired=True,
        title="ERNIE 4.5 (dense)", special="channels rotate in neighbouring pairs",
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM", _COHERE, _cohere2, _write_cohere2, spell=_spell_cohere2,
        windows=_COHERE_WINDOWS, paired=True,
        title="Cohere Command R7B and A",
        special="attention and feed-forward side by side; windows, and full layers that do not rotate",
    ),
    "glm": Family("GlmForCausalLM", _GLM, _glm, _write_glm, **_GLM_TENSORS,
        title="GLM-4", special="half of each head rotates",
    ),
    "glm4": Family(
        "Glm4ForCausalLM", _GLM, _glm4, _write_glm, **_GLM_TENSORS,
        norms=(
            "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm",
        ),
        title="GLM-4-0414", special="half of each head rotates; norms on both sides",
    ),
    "helium": Family(
        "HeliumForCausalLM",
        _SIZES | {"rms_norm_eps": 1e-8, "max_position_embeddings": 4096, "rope_theta": 1e5, "head_dim": 128},
        _helium, write=lambda config: {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias},
        paired=True,
        title="Helium", special="channels rotate in neighbouring pairs",
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM", _MISTRAL_3, _ministral3, _write_ministral3, windows=IN_ALL_LAYERS,
        within=("mistral3",), ignored=_VISION,
        title="Ministral 3 (text)", special="queries grow with their positions",
    ),
    **MIXED,
}  # fmt: skip
"""Adding one here, and its cases to tests/models/hf_cases.py, adds a family."""

SUPPORTED = tuple(dict.fromkeys([*FAMILIES, *(name for row in FAMILIES.values() for name in row.within)]))
"""Every `model_type` that can be loaded; of "gemma3" and others with vision the language model alone."""
