"""Bamba and Jamba: a few layers of attention among those of Mamba-2 and Mamba."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.feed_forward import GatedMLP, MoE, mlp_of
from kvjax.models.hf_family import Json, TensorRows
from kvjax.models.hf_mixed.mamba2 import mamba2_block
from kvjax.models.hf_mixed.pieces import attention, experts, mlp, stacked_rows, whole
from kvjax.models.hf_numbers import int_if_whole
from kvjax.models.mixers.attention import Attention, mixer_of
from kvjax.models.mixers.mamba import Mamba
from kvjax.models.mixers.mamba2 import Mamba2
from kvjax.ops.base.rope import Rope


def _norms(config: Config) -> Iterator[tuple[str, list[TensorRows]]]:
    yield "input_layernorm.weight", whole("attn_norm", config.d_model)
    yield "pre_ff_layernorm.weight", whole("mlp_norm", config.d_model)


# --- Bamba -------------------------------------------------------------------------------------------


def spell_bamba(data: Json) -> dict[str, Any]:
    """Half of every head rotates, whatever a file says."""
    return {"partial_rotary_factor": 0.5}


def read_bamba(data: Json, rope: Rope) -> dict[str, Any]:
    if data["mamba_proj_bias"] or not data["mamba_conv_bias"]:
        raise InputError("mamba_proj_bias = true or mamba_conv_bias = false is not supported for bamba")
    heads, inner = data["mamba_n_heads"], data["mamba_expand"] * data["hidden_size"]
    groups = data["mamba_n_groups"]
    state = Mamba2(
        heads, data["mamba_d_state"], inner // heads, groups, conv=data["mamba_d_conv"], norm_groups=groups
    )
    attends = data.get("attn_layer_indices") or []
    return {
        "mixers": tuple(Attention() if i in attends else state for i in range(data["num_hidden_layers"])),
        "mlp_bias": bool(data.get("mlp_bias")),
        "qkv_bias": bool(data.get("attention_bias")),
        "o_bias": bool(data.get("attention_bias")),
    }


def write_bamba(config: Config) -> dict[str, Any]:
    state = next(word for word in config.mixers if isinstance(word, Mamba2))
    return {
        "attn_layer_indices": [i for i, m in enumerate(config.mixers) if isinstance(m, Attention)],
        "mamba_n_heads": state.heads,
        "mamba_n_groups": state.key_heads,
        "mamba_d_state": state.key_dim,
        "mamba_d_head": state.value_dim,
        "mamba_d_conv": state.conv,
        "mamba_expand": int_if_whole(state.heads * state.value_dim / config.d_model),
        "mlp_bias": config.mlp_bias,
    }


def bamba(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    yield from _norms(config)
    if isinstance(mixer_of(config, layer), Mamba2):
        yield from mamba2_block(config, layer, "mamba")
    else:
        yield from attention(config, layer)
    yield from mlp(config, layer, dense="feed_forward")


# --- Jamba -------------------------------------------------------------------------------------------


def read_jamba(data: Json, rope: Rope) -> dict[str, Any]:
    """One block with unrotated attention in every period, and experts in every second layer."""
    if data["mamba_proj_bias"] or not data["mamba_conv_bias"]:
        raise InputError("mamba_proj_bias = true or mamba_conv_bias = false is not supported for jamba")
    rank = data["mamba_dt_rank"]
    state = Mamba(
        data["mamba_expand"] * data["hidden_size"], data["mamba_d_state"], None if rank == "auto" else rank,
        data["mamba_d_conv"], normed=True,
    )  # fmt: skip
    word = MoE(data["num_experts"], data["num_experts_per_tok"], data["intermediate_size"], normalise=False)
    layers = range(data["num_hidden_layers"])

    def among(i: int, kind: str) -> bool:
        return i % data[f"{kind}_layer_period"] == data[f"{kind}_layer_offset"]

    sparse = [among(i, "expert") and data["num_experts"] > 1 for i in layers]
    return {
        "mixers": tuple(Attention(rotates=False) if among(i, "attn") else state for i in layers),
        "mlps": tuple(word if one else GatedMLP() for one in sparse),
    }


def write_jamba(config: Config) -> dict[str, Any]:
    state = next(word for word in config.mixers if isinstance(word, Mamba))
    attends = [i for i, m in enumerate(config.mixers) if isinstance(m, Attention)]
    sparse = [i for i, word in enumerate(config.mlps) if isinstance(word, MoE)]
    out: dict[str, Any] = {
        **period("attn", attends, config.layers),
        **period("expert", sparse, config.layers),
        "num_experts": 1,
        "mamba_d_state": state.states,
        "mamba_d_conv": state.conv,
        "mamba_expand": int_if_whole(state.width / config.d_model),
        "mamba_dt_rank": state.dt_rank(config),
    }
    if sparse:
        word = config.mlps[sparse[0]]
        assert isinstance(word, MoE)
        out |= {"num_experts": word.experts, "num_experts_per_tok": word.top}
    return out


def period(kind: str, layers: list[int], count: int) -> dict[str, int]:
    """How often layers of a kind come, and the first of them; one that never comes lies above the last."""
    first = layers[0] if layers else count
    step = layers[1] - first if len(layers) > 1 else count + 1
    return {f"{kind}_layer_period": max(step, first + 1), f"{kind}_layer_offset": first}


def jamba(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    yield from _norms(config)
    if isinstance(mixer_of(config, layer), Mamba):
        yield from _mamba(config, layer)
    else:
        yield from attention(config, layer)
    if not isinstance(word := mlp_of(config, layer), MoE):
        yield from mlp(config, layer, dense="feed_forward")
        return
    for name, pieces in experts(config, layer, "feed_forward", ("gate_proj", "up_proj", "down_proj")):
        router = name == "feed_forward.gate.weight"
        yield ("feed_forward.router.weight", whole("router", word.experts)) if router else (name, pieces)


def _mamba(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    """Tensors of a Mamba layer with norms of dt, B and C."""
    sizes = mixer_of(config, layer).shapes(config)
    width = sizes["skip"][-1]
    yield "mamba.in_proj.weight", stacked_rows({"inner": width, "inner_gate": width})
    names = {
        "conv1d.weight": "conv",
        "conv1d.bias": "conv_bias",
        "x_proj.weight": "selection",
        "dt_proj.weight": "dt_up",
        "dt_proj.bias": "dt_bias",
        "A_log": "a_log",
        "D": "skip",
        "out_proj.weight": "out",
        "dt_layernorm.weight": "dt_norm",
        "b_layernorm.weight": "b_norm",
        "c_layernorm.weight": "c_norm",
    }
    for name, leaf in names.items():
        yield f"mamba.{name}", whole(leaf, sizes[leaf][-1])
