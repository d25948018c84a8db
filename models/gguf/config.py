"""Metadata of a GGUF file, converted to the config.json that the model has on the Hugging Face hub.

Settings that llama.cpp derives from the architecture (windows of every second layer, gates of experts)
are written out here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvjax.base.errors import InputError
from kvjax.models.gguf.reader import Gguf
from kvjax.models.gguf.rope import rope_fields

Json = dict[str, Any]

_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
}
_ATTENTION = {
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}


def config_of(file: Gguf) -> Json:
    """The config.json of a file's model. Raises InputError for an unsupported architecture."""
    if (kind := file.get("general.type", "model")) != "model":
        raise InputError(
            f"{file.path} is a GGUF of the type {kind!r}, expected a whole model: give the model's file"
        )
    if file.architecture not in READ:
        raise InputError(
            f"{file.path} is of the architecture {file.architecture!r}, expected one that is read from GGUF: "
            f"{', '.join(READ)}"
        )
    if "token_embd.weight" not in file.tensors:
        raise InputError(f"{file.path} has no token_embd.weight: it holds no language model")
    data: Json = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **{name: file.need(key) for name, key in _SIZES.items()},
    }
    return data | READ[file.architecture](file)


def _attention(file: Gguf) -> Json:
    """Sizes of attention and of dense feed-forwards, and their rotation."""
    data = {name: _same(file, key, file.need(key)) for name, key in _ATTENTION.items()}
    heads = data["num_attention_heads"]
    data["num_key_value_heads"] = _same(
        file, "attention.head_count_kv", file.of("attention.head_count_kv", heads)
    )
    data["head_dim"] = file.of("attention.key_length", file.need("embedding_length") // max(heads, 1))
    if (values := file.of("attention.value_length", data["head_dim"])) != data["head_dim"]:
        raise InputError(
            f"{file.path} has keys of {data['head_dim']} and values of {values} channels, which no family "
            f"of {file.architecture} that is read here has"
        )
    data["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    return data | rope_fields(file, data["head_dim"])


def _same(file: Gguf, key: str, value: Any) -> Any:
    """The value of a key that may have one entry per layer, if all layers have the same."""
    if not isinstance(value, list):
        return value
    if len(set(value)) == 1:
        return value[0]
    raise InputError(f"{file.path} gives its layers different {key}, expected one value for all of them")


def _llama(file: Gguf) -> Json:
    data = _attention(file) | {"mlp_bias": "blk.0.ffn_up.bias" in file.tensors}
    if not file.of("expert_count", 0):
        return {"model_type": "llama", **data}
    experts = {"num_local_experts": file.need("expert_count"), "sliding_window": None}
    return {"model_type": "mixtral", **data, **experts, "num_experts_per_tok": file.need("expert_used_count")}


def _qwen(model_type: str) -> Callable[[Gguf], Json]:
    return lambda file: {"model_type": model_type, **_attention(file), "use_sliding_window": False}


def _qwen3_moe(file: Gguf) -> Json:
    return _qwen("qwen3_moe")(file) | {
        "num_experts": file.need("expert_count"),
        "num_experts_per_tok": file.need("expert_used_count"),
        "moe_intermediate_size": file.of("expert_feed_forward_length", file.of("feed_forward_length")),
        "norm_topk_prob": True,
    }


def _gemma2(file: Gguf) -> Json:
    data = {
        "model_type": "gemma2",
        "attn_logit_softcapping": file.of("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.of("final_logit_softcapping", 30.0),
        "sliding_window_pattern": 2,
    }
    return data | _gemma(file, large=46)


def _gemma3(file: Gguf) -> Json:
    data = {
        "model_type": "gemma3_text",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": file.of("final_logit_softcapping"),
        "sliding_window_pattern": file.of("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": float(file.of("rope.freq_base_swa", 10000.0)),
    }
    return data | _gemma(file, large=62)


def _gemma(file: Gguf, large: int) -> Json:
    """Gemma settings. Files lack the scale of queries: models with `large` layers (27B) have another."""
    data = _attention(file)
    if (scale := file.of("attention.scale")) is not None:
        scalar = float(scale) ** -2
    elif file.need("block_count") == large:
        scalar = file.need("embedding_length") / data["num_attention_heads"]
    else:
        scalar = data["head_dim"]
    return data | {
        "sliding_window": file.need("attention.sliding_window"),
        "query_pre_attn_scalar": scalar,
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _phi3(file: Gguf) -> Json:
    data = _attention(file)
    rotated = file.of("rope.dimension_count", data["head_dim"])
    return {
        "model_type": "phi3",
        **data,
        "partial_rotary_factor": rotated / data["head_dim"],
        "sliding_window": file.of("attention.sliding_window", 0) or None,
    }


def _olmo2(file: Gguf) -> Json:
    if file.of("attention.sliding_window"):
        raise InputError(f"{file.path} is of OLMo 3, with windows, expected OLMo 2")
    return {"model_type": "olmo2", **_attention(file)}


_SIGMOID = 2


def _deepseek2(file: Gguf) -> Json:
    """DeepSeek-V2 or, if sigmoids choose experts, V3. Newer files give sizes of heads separately (`_mla`)."""
    third = file.of("expert_gating_func", 1) == _SIGMOID
    rotated = file.need("rope.dimension_count")
    rank = file.need("attention.kv_lora_rank")
    width = file.of("attention.key_length_mla", file.need("attention.key_length"))
    groups, chosen = file.of("expert_group_count", 1), file.of("expert_group_used_count", 1)
    data = {name: _same(file, key, file.need(key)) for name, key in _ATTENTION.items()}
    return data | {
        "model_type": "deepseek_v3" if third else "deepseek_v2",
        "num_key_value_heads": data["num_attention_heads"],
        "kv_lora_rank": rank,
        "q_lora_rank": file.of("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": file.of("attention.value_length_mla", file.need("attention.value_length")),
        "n_routed_experts": file.need("expert_count"),
        "num_experts_per_tok": file.need("expert_used_count"),
        "n_shared_experts": file.of("expert_shared_count", 0),
        "moe_intermediate_size": file.need("expert_feed_forward_length"),
        "first_k_dense_replace": file.of("leading_dense_block_count", 0),
        "routed_scaling_factor": float(file.of("expert_weights_scale", 1.0)) or 1.0,
        "norm_topk_prob": bool(file.of("expert_weights_norm", False)),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": chosen,
        **rope_fields(file, rotated),
    }


def _mamba2(file: Gguf) -> Json:
    inner, heads = file.need("ssm.inner_size"), file.need("ssm.time_step_rank")
    return {
        "model_type": "mamba2",
        "num_heads": heads,
        "head_dim": inner // heads,
        "expand": inner / file.need("embedding_length"),
        "state_size": file.need("ssm.state_size"),
        "n_groups": file.of("ssm.group_count", 1),
        "conv_kernel": file.need("ssm.conv_kernel"),
        "layer_norm_epsilon": file.need("attention.layer_norm_rms_epsilon"),
    }


READ: dict[str, Callable[[Gguf], Json]] = {
    "llama": _llama,
    "qwen2": _qwen("qwen2"),
    "qwen3": _qwen("qwen3"),
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "deepseek2": _deepseek2,
    "mamba2": _mamba2,
}
"""Every architecture that is read, by its name in GGUF."""
