"""Converts a `Config` to the config.json of Hugging Face checkpoints; inverts `kvjax.models.hf_config`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.hf_config import config_from_hf
from kvjax.models.hf_families import FAMILIES, SUPPORTED
from kvjax.models.hf_ropes import scaling_fields
from kvjax.ops.base.long_rope import LongRope

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu2": "relu2"}

# transformers 5.24 refuses an int in these fields.
_FLOATS = (
    "rms_norm_eps",
    "layer_norm_epsilon",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "routed_scaling_factor",
    "swiglu_limit",
    "norm_eps",
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "layer_norm_eps",
    "logit_scale",
    "attn_scale",
    "time_step_min",
)


def config_to_hf(config: Config) -> dict[str, Any]:
    """config.json of a model, in the spelling that transformers 4 and 5 both read.

    Raises InputError if no class of transformers computes what `config` says.
    """
    if config.family not in FAMILIES:
        raise InputError(f"family {config.family!r} is unknown, expected one of {', '.join(SUPPORTED)}")
    family = FAMILIES[config.family]
    data: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        family.activation: _ACTIVATIONS[config.activation],
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.o_bias,
        "max_position_embeddings": _positions(config),
        **_rope_fields(config),
        **family.windows.write(config),
    }
    try:
        data |= family.write(config)
    except (AttributeError, IndexError) as error:
        raise InputError(
            f"family {config.family} of transformers has no such layers: use save_checkpoint instead"
        ) from error
    data |= {name: float(data[name]) for name in _FLOATS if data.get(name) is not None}
    back = config_from_hf(data)
    # More positions than the model asked for do no harm.
    fields = [f.name for f in dataclasses.fields(Config) if f.name != "max_positions"]
    lost = [f"{n} = {getattr(config, n)!r}" for n in fields if getattr(config, n) != getattr(back, n)]
    if lost:
        raise InputError(
            f"family {config.family} of transformers has no {', '.join(lost)}: use save_checkpoint instead"
        )
    return data


def _positions(config: Config) -> int:
    return config.rope.original_max if config.rope.kind == "dynamic" else config.max_positions


def _rope_fields(config: Config) -> dict[str, Any]:
    rope, local = config.rope, config.rope_local
    if rope.kind == "none" or FAMILIES[config.family].local_rope == "each":
        return {}
    fields: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.rotary_dim is not None:
        share = rope.rotary_dim / config.head_dim
        # Readers round down, so a quotient that is slightly too small would lose a channel.
        exact = int(share * config.head_dim) == rope.rotary_dim
        fields["partial_rotary_factor"] = share if exact else float(np.nextafter(share, 1))
    if isinstance(rope, LongRope):
        # Phi-3's class reads it here.
        fields["original_max_position_embeddings"] = rope.original_max
    if FAMILIES[config.family].local_rope != "own":
        # gpt-oss is scaled unless its file says that it is not.
        silent = rope.kind == "default" and "rope_parameters" not in FAMILIES[config.family].defaults
        return fields | ({} if silent else {"rope_scaling": scaling_fields(rope)})
    local = local or rope
    if local.kind == "default":
        scaling = {} if rope.kind == "default" else {"rope_scaling": scaling_fields(rope)}
        return fields | {"rope_local_base_freq": local.theta} | scaling
    both = {"full_attention": rope, "sliding_attention": local}
    return {"rope_parameters": {k: {"rope_theta": r.theta, **scaling_fields(r)} for k, r in both.items()}}
