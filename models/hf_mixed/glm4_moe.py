"""GLM-4.5 to 4.7: attention that rotates half of a head, and the experts of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvjax.models.config import Config
from kvjax.models.hf_family import Json, TensorRows
from kvjax.models.hf_mixed.deepseek import read_experts, write_experts
from kvjax.models.hf_mixed.pieces import attention, mlp, norms
from kvjax.ops.base.rope import Rope


def read_glm4_moe(data: Json, rope: Rope) -> dict[str, Any]:
    return {
        "mlps": read_experts(data, third=True),
        "qk_norm": "head" if data.get("use_qk_norm") else "",
        "qkv_bias": bool(data.get("attention_bias")),
    }


def write_glm4_moe(config: Config) -> dict[str, Any]:
    own = {"use_qk_norm": bool(config.qk_norm), "attention_bias": config.qkv_bias}
    return write_experts(config) | own


def glm4_moe(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    yield from norms(config)
    yield from attention(config, layer)
    yield from mlp(config, layer, "shared_experts")
