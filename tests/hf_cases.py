"""Tiny random checkpoints of every family, as the config.json they have on the hub: shared by the fixtures of
the plain suite, the script that makes them, and the parity suite.

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
    return _case("llama", rope_theta=1000.0, tie_word_embeddings=True, **rope)


def _new(kind: str, theta: float = 1000.0, **params: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **params}


CASES: dict[str, dict[str, Any]] = {
    "llama": _case("llama", attention_bias=True, mlp_bias=True, rope_theta=500.0),
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
        num_hidden_layers=4,
        query_pre_attn_scalar=11,
        sliding_window=5,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=4.0,
        hidden_activation="gelu_pytorch_tanh",
    ),
    "gemma3_text": _case(
        "gemma3_text",
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
}
