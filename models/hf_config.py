"""config.json of Hugging Face checkpoints to `Config`: one row per family, nothing about weights."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.hf_mixed import MIXED, Mixed
from kvjax.models.hf_numbers import check_numbers, size
from kvjax.ops.base.rope import Rope

Json = Mapping[str, Any]


class Family(NamedTuple):
    """A `model_type`: its class in transformers, and the values that its config.json may leave out."""

    architecture: str
    defaults: dict[str, Any]


_PLAIN = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "rope_theta": 10000.0}
_QWEN = _PLAIN | {"max_position_embeddings": 32768, "max_window_layers": 28}
_GEMMA = _PLAIN | {
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

FAMILIES = {
    "llama": Family("LlamaForCausalLM", _PLAIN),
    "mistral": Family(
        "MistralForCausalLM",
        _PLAIN | {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    ),
    "qwen2": Family("Qwen2ForCausalLM", _QWEN),
    "qwen3": Family("Qwen3ForCausalLM", _QWEN | {"head_dim": 128}),
    "gemma2": Family(
        "Gemma2ForCausalLM", _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    ),
    "gemma3_text": Family("Gemma3ForCausalLM", _GEMMA | _GEMMA_3),
    "phi3": Family("Phi3ForCausalLM", _PLAIN | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}),
    "olmo2": Family("Olmo2ForCausalLM", _PLAIN | {"rms_norm_eps": 1e-5}),
}
SUPPORTED = (*FAMILIES, *MIXED, "gemma3")
"""Every `model_type` that can be loaded; of "gemma3" the language model alone."""

QWENS = ("qwen2", "qwen3", "qwen3_moe")

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
_NUMBERS = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
}
_SCALED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}


# All other classes rotate whole heads, whatever partial_rotary_factor says.
_PARTIAL = ("phi3", "qwen3_next")

# No decoder is nearly as deep, and the words of all layers of a mistyped number would fill the memory.
_MOST_LAYERS = 10_000


def config_from_hf(data: Json) -> Config:
    """The `Config` that a config.json describes.

    Raises InputError for an unsupported model_type, rotary scaling, activation or quantisation, and for
    missing sizes.

    >>> sizes = dict(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    >>> config_from_hf({"model_type": "llama", "intermediate_size": 64, **sizes}).head_dim
    8
    """
    family, data = _family(data)
    if (layers := size(data, "num_hidden_layers")) > _MOST_LAYERS:
        raise InputError(
            f"config.json gives num_hidden_layers = {layers}, expected at most {_MOST_LAYERS}: correct it"
        )
    try:
        check_numbers(row_of(family).defaults, data)
        return Config(**_fields(family, data))
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"config.json lacks {error.args[0]}, which {family} needs") from error
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise InputError(f"config.json describes no model that can be built: {error}") from error


def _fields(family: str, data: Json) -> dict[str, Any]:
    d_model, heads = size(data, "hidden_size"), size(data, "num_attention_heads")
    head_dim = size(data, "head_dim") if data.get("head_dim") else d_model // heads
    head_dim = data.get("qk_rope_head_dim", head_dim)
    rope, rope_local = _ropes(family, data, head_dim)
    windows = _windows(family, data)
    fields: dict[str, Any] = dict(
        vocab=size(data, "vocab_size"),
        d_model=d_model,
        layers=size(data, "num_hidden_layers"),
        heads=heads,
        kv_heads=size(data, "num_key_value_heads") if data.get("num_key_value_heads") else heads,
        head_dim=head_dim,
        d_ff=size(data, "intermediate_size"),
        norm_eps=float(data["rms_norm_eps"]),
        tied=bool(data.get("tie_word_embeddings", False)),
        max_positions=_reach(rope, size(data, "max_position_embeddings")),
        rope=rope,
        rope_local=rope_local if any(windows) else None,
        windows=windows,
        activation=_activation(data),
        family=family,
    )
    mixed = MIXED.get(family)
    return fields | (_features(family, data) if mixed is None else mixed.read(data, rope))


def _family(data: Json) -> tuple[str, dict[str, Any]]:
    """(family, the language model's settings with the family's defaults below them)."""
    name = data.get("model_type")
    if not isinstance(name, str | None):
        raise InputError(f"config.json gives model_type = {name!r:.40}, expected a text: correct it")
    if name == "gemma3":
        text = data.get("text_config")
        outer = {k: data[k] for k in ("tie_word_embeddings", "eos_token_id") if k in data}
        name, data = "gemma3_text", {**outer, **(text if isinstance(text, Mapping) else data)}
    if name not in FAMILIES and name not in MIXED:
        near = difflib.get_close_matches(str(name), SUPPORTED, 1)
        hint = f" (the nearest is {near[0]})" if near else ""
        raise InputError(
            f"model_type {name!r} is not supported{hint}: choose a checkpoint of {', '.join(SUPPORTED)}"
        )
    if data.get("quantization_config"):
        given = data["quantization_config"]
        method = given.get("quant_method", "unknown") if isinstance(given, Mapping) else given
        raise InputError(
            f"the weights are quantised ({method}): load the checkpoint in float32, float16 or bfloat16"
        )
    if data.get("use_bidirectional_attention"):
        raise InputError("use_bidirectional_attention is set: kvjax runs causal decoders only")
    given = {k: v for k, v in data.items() if v is not None or k in _NULLABLE}
    return name, {**row_of(name).defaults, **given}


def row_of(family: str) -> Family | Mixed:
    """What is known of a `model_type`; KeyError where nothing is."""
    return FAMILIES[family] if family in FAMILIES else MIXED[family]


# Null means "none" for these, not "the default".
_NULLABLE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")


def _activation(data: Json) -> str:
    name = data.get("hidden_activation") or data.get("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise InputError(f"hidden_act {name!r} is not supported, expected one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _features(family: str, data: Json) -> dict[str, Any]:
    """What sets a family apart, apart from sizes, rotation and windows."""
    bias = bool(data.get("attention_bias", False))
    out: dict[str, Any] = {"qkv_bias": bias, "o_bias": bias}
    if family == "llama":
        return out | {"mlp_bias": bool(data.get("mlp_bias", False))}
    if family in ("mistral", "phi3"):
        return {}
    if family == "qwen2":
        return {"qkv_bias": True}
    if family == "qwen3":
        return out | {"qk_norm": "head"}
    if family == "olmo2":
        return out | {"norms": "post", "qk_norm": "full"}
    return out | {
        "norms": "both",
        "norm_offset": 1.0,
        "embed_scale": float(data["hidden_size"]) ** 0.5,
        "query_scale": float(data["query_pre_attn_scalar"]) ** -0.5,
        "attention_softcap": data.get("attn_logit_softcapping"),
        "logit_softcap": data.get("final_logit_softcapping"),
        "qk_norm": "head" if family == "gemma3_text" else "",
    }


def _windows(family: str, data: Json) -> tuple[int | None, ...]:
    """Window of every layer; () where none has one."""
    if family in MIXED and family not in ("mixtral", "qwen3_moe"):
        return ()
    layers, window = size(data, "num_hidden_layers"), data.get("sliding_window")
    kinds = (
        data.get("layer_types") if family not in ("llama", "mistral", "mixtral", "phi3", "olmo2") else None
    )
    if family in ("llama", "olmo2") or (family in QWENS and not data.get("use_sliding_window")):
        window = None
    if window is None:
        return ()
    if kinds is not None:
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown or len(kinds) != layers:
            what = (
                f"names {', '.join(unknown)}" if unknown else f"has {len(kinds)} entries for {layers} layers"
            )
            raise InputError(
                f"layer_types {what}, expected full_attention or sliding_attention for every layer"
            )
        slides = [kind == "sliding_attention" for kind in kinds]
    elif family in QWENS:
        slides = [i >= data["max_window_layers"] for i in range(layers)]
    elif family in ("gemma2", "gemma3_text"):
        period = data.get("sliding_window_pattern", 2)
        slides = [(i + 1) % period != 0 for i in range(layers)]
    else:
        slides = [True] * layers
    return tuple(window if s else None for s in slides) if any(slides) else ()


def _ropes(family: str, data: Json, head_dim: int) -> tuple[Rope, Rope | None]:
    """(rotation, rotation of the windowed layers where it differs), from any of the spellings."""
    scaling = data.get("rope_scaling") or data.get("rope_parameters") or {}
    full, local = scaling, {}
    if set(scaling) <= {"full_attention", "sliding_attention"}:
        full, local = scaling.get("full_attention") or {}, scaling.get("sliding_attention") or {}
    rope = _rope(family, full, data, head_dim)
    if "rope_local_base_freq" in data:
        local = {"rope_theta": data["rope_local_base_freq"], **local}
    elif not local:
        return rope, None
    other = _rope(family, local, data, head_dim)
    return rope, None if other == rope else other


def _rope(family: str, params: Json, data: Json, head_dim: int) -> Rope:
    kind = params.get("rope_type", params.get("type", "default"))
    if kind != "default" and kind not in _SCALED:
        raise InputError(
            f"rotary scaling {kind!r} is not supported, expected one of default, {', '.join(_SCALED)}"
        )
    missing = [name for name in _SCALED.get(kind, ()) if params.get(name) is None]
    if missing:
        raise InputError(f"rotary scaling {kind!r} in config.json lacks {', '.join(missing)}")
    out: dict[str, Any] = {"theta": float(params.get("rope_theta") or data["rope_theta"]), "kind": kind}
    share = params.get("partial_rotary_factor", data.get("partial_rotary_factor"))
    if share is not None and int(head_dim * share) != head_dim:
        if family in _PARTIAL:
            out["rotary_dim"] = int(head_dim * share)
        elif kind != "default":
            raise InputError(
                f"config.json gives partial_rotary_factor = {share} with rotary scaling {kind!r}, which the "
                f"class of {family} cannot compute: leave one of them out"
            )
    if kind == "default":
        return Rope(**out)
    if kind == "linear":
        return Rope(**out, factor=float(params["factor"]))
    longest = data["max_position_embeddings"]
    original = data.get("original_max_position_embeddings", params.get("original_max_position_embeddings"))
    # The dynamic kind grows from the model's own length, whatever else the file says.
    out["original_max"] = int(longest if kind == "dynamic" or not original else original)
    out["factor"] = float(params.get("factor") or longest / out["original_max"])
    for name in _NUMBERS.get(kind, ()):
        if params.get(name) is not None:
            out[name] = float(params[name])
    if kind != "yarn":
        return Rope(**out)
    return Rope(**out, truncate=bool(params.get("truncate", True)))


def _reach(rope: Rope, positions: int) -> int:
    """Longest prompt: the kinds that stretch the original length reach beyond what config.json may say."""
    stretched = int(rope.factor * rope.original_max) if rope.kind in ("dynamic", "yarn") else 0
    return max(positions, stretched)
