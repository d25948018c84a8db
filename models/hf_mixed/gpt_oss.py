"""gpt-oss: learned sinks, windows in every other layer, and experts in one tensor per matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvjax.models.config import Config
from kvjax.models.feed_forward import ClampedMoE, mlp_of
from kvjax.models.hf_family import Json, TensorRows
from kvjax.models.hf_mixed.pieces import attention, norms, whole
from kvjax.models.mixers.attention import Attention
from kvjax.ops.base.rope import Rope


def read_gpt_oss(data: Json, rope: Rope) -> dict[str, Any]:
    word = ClampedMoE(
        data["num_local_experts"], data["num_experts_per_tok"], data["intermediate_size"],
        limit=float(data["swiglu_limit"]),
    )  # fmt: skip
    layers = data["num_hidden_layers"]
    return {
        "mixers": (Attention(sink=True),) * layers,
        "mlps": (word,) * layers,
        "qkv_bias": True,
        "o_bias": True,
    }


def write_gpt_oss(config: Config) -> dict[str, Any]:
    word = config.mlps[0]
    assert isinstance(word, ClampedMoE)
    return {
        "num_local_experts": word.experts,
        "num_experts_per_tok": word.top,
        "swiglu_limit": word.limit,
    }


def gpt_oss(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    yield from norms(config)
    yield from attention(config, layer)
    yield "self_attn.sinks", whole("sink_bias", config.heads)
    word = mlp_of(config, layer)
    assert isinstance(word, ClampedMoE)
    yield "mlp.router.weight", whole("router", word.experts)
    yield "mlp.router.bias", whole("router_shift", word.experts)
    both = {"gate": np.arange(0, 2 * word.width, 2), "up": np.arange(1, 2 * word.width, 2)}
    yield from _stacked(word, "gate_up_proj", both)
    yield from _stacked(word, "down_proj", {"down": np.arange(config.d_model)})


def _stacked(
    word: ClampedMoE, name: str, columns: dict[str, np.ndarray]
) -> Iterator[tuple[str, list[TensorRows]]]:
    """Matrices of all experts in one tensor [experts, inputs, outputs], and their biases in another."""
    yield (
        f"mlp.experts.{name}",
        [
            TensorRows(f"experts_{leaf}", rows, expert, transposed=True, stacked=True)
            for expert in range(word.experts)
            for leaf, rows in columns.items()
        ],
    )
    biases = [TensorRows(f"experts_{leaf}_bias", rows, transposed=True) for leaf, rows in columns.items()]
    yield f"mlp.experts.{name}_bias", biases
