"""Config of Gemma 4: full layers have heads of their own size, and may store keys as values."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax.base.errors import InputError
from kvjax.models.gguf.fields import Json, depth, windows
from kvjax.models.gguf.reader import Gguf, decoded

_FULL, _SLIDING = "full_attention", "sliding_attention"
# What channels that do not rotate have in place of a divisor of their frequency.
_STILL = 1e20


def gemma4(file: Gguf) -> Json:
    """Gemma 4 (text), with experts beside its MLP, per-layer embeddings or neither."""
    kinds = windows(file, every=6)
    full = [i for i, kind in enumerate(kinds["layer_types"]) if kind == _FULL]
    heads, each = file.need("attention.head_count_kv"), file.need("feed_forward_length")
    of_layer = heads if isinstance(heads, list) else [heads] * depth(file)
    inside = [i for i, kind in enumerate(kinds["layer_types"]) if kind == _SLIDING]
    shared = int(file.of("attention.shared_kv_layers", 0))
    own = [i for i in full if i < depth(file) - shared]
    data = {
        "model_type": "gemma4_text",
        **kinds,
        "num_attention_heads": file.need("attention.head_count"),
        "num_key_value_heads": of_layer[inside[0] if inside else 0],
        "num_global_key_value_heads": of_layer[full[-1]] if full else None,
        "head_dim": file.need("attention.key_length_swa"),
        "global_head_dim": file.need("attention.key_length"),
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in file.tensors for i in own),
        "num_kv_shared_layers": shared,
        "intermediate_size": each[0] if isinstance(each, list) else each,
        "use_double_wide_mlp": isinstance(each, list) and len({*each}) > 1,
        "rms_norm_eps": file.need("attention.layer_norm_rms_epsilon"),
        "final_logit_softcapping": file.of("final_logit_softcapping"),
        "hidden_size_per_layer_input": file.of("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": file.tensors["token_embd.weight"].shape[0],
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            _FULL: {
                "rope_type": "proportional",
                "rope_theta": float(file.need("rope.freq_base")),
                "partial_rotary_factor": _rotating(file),
            },
            _SLIDING: {"rope_type": "default", "rope_theta": float(file.need("rope.freq_base_swa"))},
        },
    }
    return data | _experts(file)


def _experts(file: Gguf) -> dict[str, Any]:
    if not file.of("expert_count", 0):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": file.need("expert_count"),
        "top_k_experts": file.need("expert_used_count"),
        "moe_intermediate_size": file.need("expert_feed_forward_length"),
    }


def _rotating(file: Gguf) -> float:
    """Compute the share of a full layer's channels that rotate: those whose frequency is not divided away."""
    held = file.tensors.get("rope_freqs.weight")
    if held is None:
        return 1.0
    divisors = np.asarray(decoded(held.data, held.kind)).ravel()
    still = divisors > _STILL
    if not (divisors[~still] == 1).all():
        raise InputError(f"{file.path} has rope_freqs other than 1 and those that stop a rotation: not read")
    return float((~still).mean())
