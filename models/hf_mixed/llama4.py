"""Llama 4: attention within chunks, layers without rotation, and experts with weighted inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.feed_forward import GatedMLP, MoE, mlp_of
from kvjax.models.hf_family import Json, TensorRows
from kvjax.models.hf_mixed.pieces import attention, in_pairs, norms, whole
from kvjax.models.hf_windows import WindowRule
from kvjax.models.mixers.attention import Attention
from kvjax.ops.base.rope import Rope

_CHUNKED, _FULL = "chunked_attention", "full_attention"


def spell_llama4(data: Json) -> dict[str, Any]:
    """Which layers are rotated, attend within chunks and have experts; `no_rope_layers`: the rotated ones."""
    layers, every, step = (
        data[name] for name in ("num_hidden_layers", "no_rope_layer_interval", "interleave_moe_layer_step")
    )
    turning = data.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
    kinds = data.get("layer_types") or [_CHUNKED if turns else _FULL for turns in turning]
    if len(turning) != layers or len(kinds) != layers or {*kinds} - {_CHUNKED, _FULL}:
        raise InputError(
            f"no_rope_layers {turning} and layer_types {kinds} must say of each of {layers} layers whether "
            f"it turns, and {_CHUNKED} or {_FULL}"
        )
    sparse = data.get("moe_layers")
    sparse = range(step - 1, layers, step) if sparse is None else sparse
    return {"no_rope_layers": turning, "layer_types": kinds, "moe_layers": [*sparse]}


def _read_chunks(data: Mapping[str, Any]) -> tuple[int | None, ...]:
    size = data.get("attention_chunk_size")
    chunks = tuple(size if kind == _CHUNKED else None for kind in data["layer_types"])
    return chunks if any(chunks) else ()


def _write_chunks(config: Config) -> dict[str, Any]:
    size = next((w for w in config.windows if w is not None), None)
    kinds = [_FULL if config.window(i) is None else _CHUNKED for i in range(config.layers)]
    return {"attention_chunk_size": size, "layer_types": kinds}


CHUNKS = WindowRule(_read_chunks, _write_chunks)


def read_llama4(data: Json, rope: Rope) -> dict[str, Any]:
    chunks, layers = _read_chunks(data), data["num_hidden_layers"]
    growth = (float(data["attn_scale"]), int(data["floor_scale"]))

    def mixer(i: int) -> Attention:
        turns, chunked = bool(data["no_rope_layers"][i]), bool(chunks and chunks[i])
        if turns:
            return Attention(unit=bool(data["use_qk_norm"]), chunked=chunked)
        grows = growth if data["attn_temperature_tuning"] else None
        shift = 1 if grows else 0
        return Attention(rotates=False, query_growth=grows, growth_shift=shift, chunked=chunked)

    width = data["intermediate_size"]
    word = MoE(
        data["num_local_experts"], data["num_experts_per_tok"], width, scores="sigmoid", normalise=False,
        shared=width, biased=False, weigh_inputs=True,
    )  # fmt: skip
    dense = GatedMLP(data["intermediate_size_mlp"])
    return {
        "mixers": tuple(mixer(i) for i in range(layers)),
        "mlps": tuple(word if i in data["moe_layers"] else dense for i in range(layers)),
    }


def write_llama4(config: Config) -> dict[str, Any]:
    words = [m for m in config.mixers if isinstance(m, Attention)]
    growth = next((m.query_growth for m in words if m.query_growth is not None), None)
    moe = next(word for word in config.mlps if isinstance(word, MoE))
    dense = next((word.width for word in config.mlps if isinstance(word, GatedMLP)), config.d_ff)
    out: dict[str, Any] = {
        "no_rope_layers": [int(m.rotates) for m in words],
        "use_qk_norm": any(m.unit for m in words),
        "attn_temperature_tuning": growth is not None,
        "moe_layers": [i for i, word in enumerate(config.mlps) if isinstance(word, MoE)],
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top,
        "intermediate_size_mlp": dense,
    }
    return out | ({"attn_scale": growth[0], "floor_scale": growth[1]} if growth else {})


def llama4(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    yield from norms(config)
    yield from in_pairs(config, attention(config, layer))
    word, d = mlp_of(config, layer), config.d_model
    room, names = "feed_forward", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    if not isinstance(word, MoE):
        sizes = word.shapes(config)
        for leaf, name in names.items():
            yield f"{room}.{name}.weight", whole(leaf, sizes[leaf][-1])
        return
    yield f"{room}.router.weight", whole("router", word.experts)
    for leaf, name in names.items():
        width = d if leaf == "down" else word.shared
        yield f"{room}.shared_expert.{name}.weight", whole(f"shared_{leaf}", width)
    both = {"gate": np.arange(word.width), "up": np.arange(word.width, 2 * word.width)}
    for name, columns in (("gate_up_proj", both), ("down_proj", {"down": np.arange(d)})):
        yield (
            f"{room}.experts.{name}",
            [
                TensorRows(f"experts_{leaf}", rows, expert, transposed=True, stacked=True)
                for expert in range(word.experts)
                for leaf, rows in columns.items()
            ],
        )
