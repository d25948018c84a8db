"""Gemma 4: heads of two sizes, keys that are values too, layers that share them, per-layer embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.feed_forward import ExpertsBesideMLP, FeedForward, GatedMLP, mlp_of
from kvjax.models.hf_family import Json, TensorRows
from kvjax.models.hf_mixed.pieces import attention, stacked_rows, whole
from kvjax.models.hf_ropes import scaling_fields
from kvjax.models.mixer import Mixer
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.key_as_value import KeyAsValue
from kvjax.models.params import layer_shapes
from kvjax.ops.base.rope import Rope

_FULL, _SLIDING = "full_attention", "sliding_attention"


def spell_gemma4(data: Json) -> dict[str, Any]:
    """Which layers are full, and the size and number of their KV heads.

    Since transformers 5.24 a file gives these per layer. The last layer is full, whatever a file says.
    """
    layers = data["num_hidden_layers"]
    kinds = [*(data.get("layer_types") or [_SLIDING if (i + 1) % 6 else _FULL for i in range(layers)])]
    kinds[-1:] = [_FULL]
    out: dict[str, Any] = {"layer_types": kinds}
    given = data.get("per_layer_config")
    if given is None:
        return out
    # Numbers of layers may begin with zeros: "05".
    sizes = {int(i): one for i, one in given.items()}
    full = [sizes.get(i, {}) for i, kind in enumerate(kinds) if kind == _FULL]
    others = [sizes[i] for i, kind in enumerate(kinds) if kind != _FULL and sizes.get(i)]
    known = {"head_dim", "num_key_value_heads"}
    if others or any(one != full[0] or one.keys() - known for one in full):
        raise InputError(
            "per_layer_config gives layers of one kind different settings, or others than head_dim and "
            "num_key_value_heads: expected the same two for all full layers alone"
        )
    heads = full[0].get("num_key_value_heads")
    return out | {
        "global_head_dim": full[0].get("head_dim", data["head_dim"]),
        "num_global_key_value_heads": heads,
        "attention_k_eq_v": data.get("attention_k_eq_v", False),
    }


def read_gemma4(data: Json, rope: Rope) -> dict[str, Any]:
    layers, kinds = data["num_hidden_layers"], data["layer_types"]
    first = layers - data["num_kv_shared_layers"]
    width = data.get("hidden_size_per_layer_input") or 0
    if width and data["vocab_size_per_layer_input"] != data["vocab_size"]:
        raise InputError(
            f"vocab_size_per_layer_input is {data['vocab_size_per_layer_input']}, expected the vocab_size of "
            f"{data['vocab_size']}"
        )
    if len(kinds) != layers or {*kinds} - {*kinds[: max(first, 0)]}:
        raise InputError(
            f"layer_types {kinds} and num_kv_shared_layers = {layers - first} leave layers without keys: "
            f"expected {layers} kinds, each of which occurs in the first {max(first, 0)}"
        )
    return {
        "mixers": tuple(_mixer(data, i, first) for i in range(layers)),
        "mlps": tuple(_mlp(data, i >= first) for i in range(layers)),
        "norms": "both",
        "qk_norm": "head",
        "qkv_bias": bool(data.get("attention_bias")),
        "o_bias": bool(data.get("attention_bias")),
        "embed_scale": float(data["hidden_size"]) ** 0.5,
        "query_scale": 1.0,
        "logit_softcap": data.get("final_logit_softcapping"),
        "layer_embeddings": width,
        "layer_scales": True,
    }


def _mixer(data: Json, layer: int, first: int) -> Mixer:
    """Build a layer's attention; those from `first` on read the last one of their kind below it."""
    kinds, full = data["layer_types"], data["layer_types"][layer] == _FULL
    source = None
    if layer >= first:
        source = max(i for i, kind in enumerate(kinds[:first]) if kind == kinds[layer])
    sizes: dict[str, Any] = {}
    if full and data["global_head_dim"] != data["head_dim"]:
        sizes["head_dim"] = data["global_head_dim"]
    heads = data.get("num_global_key_value_heads") if data["attention_k_eq_v"] else None
    if full and heads not in (None, data["num_key_value_heads"]):
        sizes["kv_heads"] = heads
    if not full or not data["attention_k_eq_v"]:
        return Attention(source=source, value_norm=source is None, **sizes)
    if source is not None:
        raise InputError(
            "attention_k_eq_v beside num_kv_shared_layers is not supported: no published Gemma 4 has both"
        )
    return KeyAsValue(**sizes)


def _mlp(data: Json, shares: bool) -> FeedForward:
    if data["enable_moe_block"]:
        return ExpertsBesideMLP(data["num_experts"], data["top_k_experts"], data["moe_intermediate_size"])
    wide = shares and data["use_double_wide_mlp"]
    return GatedMLP(2 * data["intermediate_size"]) if wide else GatedMLP()


def write_gemma4(config: Config) -> dict[str, Any]:
    full = [m for i, m in enumerate(config.mixers) if config.window(i) is None]
    tied, first = isinstance(full[0], KeyAsValue), full[0]
    assert isinstance(first, Attention | KeyAsValue)
    moe, dim = config.mlps[0], first.channels(config)
    wide = {getattr(word, "width", None) for word in config.mlps} - {None}
    out: dict[str, Any] = {
        "global_head_dim": dim,
        "num_global_key_value_heads": first.slots_of(config).heads if tied else None,
        "attention_k_eq_v": tied,
        "num_kv_shared_layers": sum("slots" in m.takes for m in config.mixers),
        "final_logit_softcapping": config.logit_softcap,
        "hidden_size_per_layer_input": config.layer_embeddings,
        "vocab_size_per_layer_input": config.vocab,
        "use_double_wide_mlp": bool(wide) and not isinstance(moe, ExpertsBesideMLP),
        "enable_moe_block": isinstance(moe, ExpertsBesideMLP),
        "rope_parameters": {
            _FULL: _rope_of(config.rope, dim),
            _SLIDING: _rope_of(config.rope_local or config.rope, config.head_dim),
        },
    }
    if isinstance(moe, ExpertsBesideMLP):
        out |= {"num_experts": moe.experts, "top_k_experts": moe.top, "moe_intermediate_size": moe.width}
    return out


def _rope_of(rope: Rope, head_dim: int) -> dict[str, Any]:
    share = {} if rope.rotary_dim is None else {"partial_rotary_factor": rope.rotary_dim / head_dim}
    return {"rope_theta": rope.theta, **scaling_fields(rope), **share}


def gemma4(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    sizes, d = layer_shapes(config, layer), config.d_model
    names = {
        "attn_norm": "input_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
        "dense_post_norm": "post_feedforward_layernorm_1",
        "experts_norm": "pre_feedforward_layernorm_2",
        "experts_post_norm": "post_feedforward_layernorm_2",
        "embed_post_norm": "post_per_layer_input_norm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "router": "router.proj",
        "embed_gate": "per_layer_input_gate",
        "embed_up": "per_layer_projection",
    }
    for leaf, name in names.items():
        if leaf in sizes:
            yield f"{name}.weight", whole(leaf, sizes[leaf][-1])
    yield "layer_scalar", whole("layer_scale", 1)
    yield from attention(config, layer)
    word = mlp_of(config, layer)
    if isinstance(word, ExpertsBesideMLP):
        yield "router.scale", whole("router_scale", d)
        yield "router.per_expert_scale", whole("expert_scale", word.experts)
        both = stacked_rows({"experts_gate": word.width, "experts_up": word.width})
        for name, pieces in (("gate_up_proj", both), ("down_proj", whole("experts_down", d))):
            every = [p._replace(expert=e, stacked=True) for e in range(word.experts) for p in pieces]
            yield f"experts.{name}", every
