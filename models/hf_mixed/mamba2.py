"""Mamba-2."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.feed_forward import NoMLP
from kvjax.models.hf_family import Json, TensorRows
from kvjax.models.hf_mixed.pieces import stacked_rows, whole
from kvjax.models.hf_numbers import int_if_whole
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.mixers.mamba2 import Mamba2
from kvjax.ops.base.rope import Rope


def read_mamba2(data: Json, rope: Rope) -> dict[str, Any]:
    if data["use_bias"] or not data["use_conv_bias"]:
        raise InputError("use_bias = true or use_conv_bias = false is not supported for mamba2")
    low, high = (x["__float__"] if isinstance(x, dict) else x for x in data["time_step_limit"])
    if float(low) != 0 or not math.isinf(float(high)):
        raise InputError(
            f"time_step_limit {data['time_step_limit']} is not supported, expected 0 and infinity"
        )
    word = Mamba2(
        data["num_heads"], data["state_size"], data["head_dim"], data["n_groups"], conv=data["conv_kernel"],
        # As in the authors' code and transformers 5.24; 5.2 normalises all channels together.
        norm_groups=data["n_groups"],
    )  # fmt: skip
    layers = data["num_hidden_layers"]
    return {
        "mixers": (word,) * layers,
        "mlps": (NoMLP(),) * layers,
        "rope": Rope(kind="none"),
        "norm_eps": float(data["layer_norm_epsilon"]),
    }


def write_mamba2(config: Config) -> dict[str, Any]:
    word = config.mixers[0]
    assert isinstance(word, Mamba2)
    return {
        "num_heads": word.heads,
        "state_size": word.key_dim,
        "head_dim": word.value_dim,
        "n_groups": word.key_heads,
        "conv_kernel": word.conv,
        "expand": int_if_whole(word.heads * word.value_dim / config.d_model),
        "layer_norm_epsilon": config.norm_eps,
    }


def mamba2(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    yield "norm.weight", whole("attn_norm", config.d_model)
    yield from mamba2_block(config, layer, "mixer")


def mamba2_block(config: Config, layer: int, room: str) -> Iterator[tuple[str, list[TensorRows]]]:
    """Tensors of a Mamba-2 layer under the name `room`, without the norm before it."""
    sizes = mixer_of(config, layer).shapes(config)
    yield f"{room}.in_proj.weight", stacked_rows({leaf: sizes[leaf][-1] for leaf in ("z", "xbc", "dt")})
    yield f"{room}.conv1d.weight", whole("conv", sizes["conv"][-1])
    yield f"{room}.conv1d.bias", whole("conv_bias", sizes["conv"][-1])
    names = {"dt_bias": "dt_bias", "A_log": "a_log", "D": "skip", "norm.weight": "out_norm"}
    for name, leaf in names.items():
        if leaf in sizes:
            yield f"{room}.{name}", whole(leaf, sizes[leaf][-1])
    yield f"{room}.out_proj.weight", whole("o", config.d_model)
