"""Falcon-H1: Mamba-2 and attention side by side in every layer, with multipliers.

A layer of the checkpoint is two of ours, Mamba-2 and then attention with the feed-forward, which both read
what came into the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.feed_forward import NoMLP
from kvjax.models.gated_mlps import ScaledMLP
from kvjax.models.hf_family import Json, TensorRows
from kvjax.models.hf_mixed.mamba2 import mamba2_block
from kvjax.models.hf_mixed.pieces import attention, mlp, whole
from kvjax.models.mixers.attention import Attention, mixer_of
from kvjax.models.mixers.mamba2 import Mamba2
from kvjax.ops.base.rope import Rope

_FLAGS = ("mamba_proj_bias", "projectors_bias", "attention_bias", "mlp_bias")


def spell_falcon_h1(data: Json) -> dict[str, Any]:
    """Two layers for each one of the file, and the width of the state space."""
    width = data["mamba_d_ssm"]
    width = data["mamba_expand"] * data["hidden_size"] if width is None else width
    return {"num_hidden_layers": 2 * data["num_hidden_layers"], "mamba_d_ssm": width}


def read_falcon_h1(data: Json, rope: Rope) -> dict[str, Any]:
    if any(data.get(name) for name in _FLAGS) or not data["mamba_conv_bias"]:
        raise InputError(
            f"{', '.join(_FLAGS)} = true or mamba_conv_bias = false is not supported for falcon_h1"
        )
    low, high = (x["__float__"] if isinstance(x, dict) else x for x in data["time_step_limit"])
    if float(low) != 0 or not math.isinf(float(high)):
        raise InputError(
            f"time_step_limit {data['time_step_limit']} is not supported: expected 0 and infinity"
        )
    twice = data["num_hidden_layers"]
    asked, given = float(data["attention_in_multiplier"]), float(data["attention_out_multiplier"])
    attends = Attention(out_scale=asked * given)
    of_gate, of_down = map(float, data.get("mlp_multipliers") or (1, 1))
    fed = ScaledMLP(gate_scale=of_gate, out_scale=of_down)
    head_dim = data.get("head_dim") or data["hidden_size"] // data["num_attention_heads"]
    return {
        "mixers": (_state(data), attends) * (twice // 2),
        "mlps": (NoMLP(), fed) * (twice // 2),
        "inputs": tuple(i - 1 if i % 2 else None for i in range(twice)),
        "embed_scale": float(data["embedding_multiplier"]),
        "logit_scale": float(data["lm_head_multiplier"]),
        # Of ten digits, so that what is written gives it again.
        "query_scale": float(f"{head_dim**-0.5 * asked**2 * float(data['key_multiplier']):.10g}"),
    }


def _state(data: Json) -> Mamba2:
    heads, width, groups = data["mamba_n_heads"], data["mamba_d_ssm"], data["mamba_n_groups"]
    if width % heads or data["mamba_d_head"] not in ("auto", width // heads):
        raise InputError(
            f"mamba_d_head = {data['mamba_d_head']} times {heads} heads is not mamba_d_ssm = {width}"
        )
    normed = "no"
    if data["mamba_rms_norm"]:
        normed = "first" if data["mamba_norm_before_gate"] else "gated"
    factors = data.get("ssm_multipliers") or (1.0,) * 5
    each = tuple(float(data["ssm_in_multiplier"]) * float(x) for x in factors)
    return Mamba2(
        heads, data["mamba_d_state"], width // heads, groups, conv=data["mamba_d_conv"], norm_groups=groups,
        normed=normed, multipliers=each, out_scale=float(data["ssm_out_multiplier"]),
    )  # fmt: skip


def write_falcon_h1(config: Config) -> dict[str, Any]:
    """Factors on inputs are written as factors on what follows."""
    state, attends, fed = config.mixers[0], config.mixers[1], config.mlps[1]
    assert isinstance(state, Mamba2) and isinstance(attends, Attention) and isinstance(fed, ScaledMLP)
    return {
        "num_hidden_layers": config.layers // 2,
        "mamba_d_ssm": state.heads * state.value_dim,
        "mamba_n_heads": state.heads,
        "mamba_d_head": state.value_dim,
        "mamba_n_groups": state.key_heads,
        "mamba_d_state": state.key_dim,
        "mamba_d_conv": state.conv,
        "mamba_rms_norm": state.normed != "no",
        "mamba_norm_before_gate": state.normed == "first",
        "ssm_multipliers": list(state.multipliers),
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": state.out_scale,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": attends.out_scale,
        "key_multiplier": config.scale * config.head_dim**0.5,
        "mlp_multipliers": [fed.gate_scale, fed.out_scale],
        "embedding_multiplier": config.embed_scale,
        "lm_head_multiplier": config.logit_scale,
    }


def falcon_h1(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    yield "input_layernorm.weight", whole("attn_norm", config.d_model)
    if isinstance(mixer_of(config, layer), Mamba2):
        yield from mamba2_block(config, layer, "mamba")
        return
    yield from attention(config, layer)
    yield "pre_ff_layernorm.weight", whole("mlp_norm", config.d_model)
    yield from mlp(config, layer, dense="feed_forward")
