"""Config of files whose layers are all attention and a dense feed-forward."""

from __future__ import annotations

from collections.abc import Callable

from kvjax.base.errors import InputError
from kvjax.models.gguf.fields import Json, attention, routed, same, windows
from kvjax.models.gguf.reader import Gguf


def llama(file: Gguf) -> Json:
    """Llama, Mistral without its windows, or Mixtral if there are experts."""
    data = attention(file) | {"mlp_bias": file.holds("ffn_up.bias")}
    if not file.of("expert_count", 0):
        return {"model_type": "llama", **data}
    return {"model_type": "mixtral", **data, **routed(file, "num_local_experts"), "sliding_window": None}


def ministral3(file: Gguf) -> Json:
    """Ministral 3. Its queries grow with positions beyond those that YaRN starts from."""
    data = attention(file)
    scaling = data.pop("rope_scaling", {"rope_type": "default"})
    scaling |= {"rope_theta": data["rope_theta"]}
    if weight := file.of("rope.scaling.yarn_log_multiplier"):
        # Here the file stores mscale_all_dim itself; files of other architectures store a tenth of it.
        scaling |= {"mscale": float(weight), "mscale_all_dim": float(weight)}
    if beta := file.of("attention.temperature_scale"):
        original = file.need("rope.scaling.original_context_length")
        scaling |= {"llama_4_scaling_beta": float(beta), "original_max_position_embeddings": original}
    return {"model_type": "ministral3", **data, "sliding_window": None, "rope_parameters": scaling}


def qwen(model_type: str) -> Callable[[Gguf], Json]:
    """Qwen 2 and 3, without windows."""
    return lambda file: {"model_type": model_type, **attention(file), "use_sliding_window": False}


def gemma2(file: Gguf) -> Json:
    data = {
        "model_type": "gemma2",
        "attn_logit_softcapping": file.of("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.of("final_logit_softcapping", 30.0),
        "sliding_window_pattern": 2,
    }
    return data | _gemma(file, large=46)


def gemma3(file: Gguf) -> Json:
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
    data = attention(file)
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


def phi3(file: Gguf) -> Json:
    window = file.of("attention.sliding_window", 0) or None
    return {"model_type": "phi3", **attention(file, partial=True), "sliding_window": window}


def olmo2(file: Gguf) -> Json:
    """OLMo 2, or OLMo 3 if there are windows."""
    if not file.of("attention.sliding_window"):
        return {"model_type": "olmo2", **attention(file)}
    return {"model_type": "olmo3", **attention(file), **windows(file, every=4)}


def smollm3(file: Gguf) -> Json:
    """SmolLM3. Files do not say which layers rotate: llama.cpp leaves out every fourth, too."""
    return {
        "model_type": "smollm3", **attention(file), "mlp_bias": file.holds("ffn_up.bias"),
        "use_sliding_window": False, "no_rope_layer_interval": 4,
    }  # fmt: skip


def exaone4(file: Gguf) -> Json:
    return {"model_type": "exaone4", **attention(file), **windows(file, every=4)}


def seed_oss(file: Gguf) -> Json:
    biases = {"attention_out_bias": file.holds("attn_output.bias"), "mlp_bias": file.holds("ffn_up.bias")}
    return {"model_type": "seed_oss", **attention(file), **biases}


def ernie(file: Gguf) -> Json:
    return {"model_type": "ernie4_5", **attention(file), "use_bias": file.holds("attn_q.bias")}


def glm4(file: Gguf) -> Json:
    """GLM-4-0414."""
    return {"model_type": "glm4", **attention(file, partial=True)}


def granite(file: Gguf) -> Json:
    """Granite 3 and the dense Granite 4, with a factor on embeddings, residuals, scores and logits."""
    data = {"model_type": "granite", **attention(file), "mlp_bias": file.holds("ffn_up.bias")}
    return data | multipliers(file)


def multipliers(file: Gguf) -> Json:
    """Return the four factors of a Granite model."""
    return {
        "embedding_multiplier": float(file.of("embedding_scale", 1.0)),
        "residual_multiplier": float(file.of("residual_scale", 1.0)),
        "logits_scaling": float(file.of("logit_scale", 1.0)),
        "attention_multiplier": float(file.need("attention.scale")),
    }


def cohere2(file: Gguf) -> Json:
    """Command R7B and A; the files have no biases."""
    size = file.of("attention.key_length", file.need("embedding_length") // file.need("attention.head_count"))
    if file.of("rope.dimension_count", size) != size:
        raise InputError(f"{file.path} rotates a part of each head, which no Cohere 2 does")
    return {
        "model_type": "cohere2",
        "intermediate_size": same(file, "feed_forward_length"),
        "num_attention_heads": same(file, "attention.head_count"),
        "num_key_value_heads": same(file, "attention.head_count_kv"),
        "head_dim": size,
        "layer_norm_eps": file.need("attention.layer_norm_epsilon"),
        "logit_scale": float(file.need("logit_scale")),
        "rope_theta": float(file.of("rope.freq_base", 10000.0)),
        **windows(file, every=4),
    }
