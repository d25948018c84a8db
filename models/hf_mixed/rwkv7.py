"""RWKV-7: a time mix and a channel mix in every layer, which are two layers here.

config.json and tensors are those of the flash-linear-attention library; `kvjax.models.rwkv_pth` reads the
authors' own files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.feed_forward import NoMLP
from kvjax.models.hf_family import Json, TensorRows
from kvjax.models.hf_mixed.pieces import whole
from kvjax.models.hf_numbers import int_if_whole
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.mixers.rwkv import EPS, ChannelMix, Rwkv7
from kvjax.ops.base.rope import Rope


def spell_rwkv7(data: Json) -> dict[str, Any]:
    """Two layers for each one of the file, and sizes under their common names."""
    d, width = data["hidden_size"], data.get("intermediate_size")
    return {
        "num_hidden_layers": 2 * data["num_hidden_layers"],
        "num_attention_heads": d // data["head_dim"],
        "num_key_value_heads": d // data["head_dim"],
        "intermediate_size": int(d * data["hidden_ratio"]) if width is None else width,
        "rms_norm_eps": data["norm_eps"],
    }


def read_rwkv7(data: Json, rope: Rope) -> dict[str, Any]:
    d, head_dim, layers = data["hidden_size"], data["head_dim"], data["num_hidden_layers"]
    if data.get("attn") or not data["norm_bias"] or data["hidden_act"] != "sqrelu":
        raise InputError(
            "attn, norm_bias = false or a hidden_act other than sqrelu is not supported for rwkv7"
        )
    if d % head_dim or set(data.get("value_dim") or [d]) != {d}:
        raise InputError(
            f"value_dim {data.get('value_dim')} and head_dim {head_dim} must give heads of {d} channels"
        )
    eps = data.get("head_norm_eps") or head_dim * data["norm_eps"]
    if abs(eps - EPS) > 1e-9:
        raise InputError(
            f"head_dim {head_dim} times norm_eps {data['norm_eps']} is the eps of the norm over a head, "
            f"expected {EPS}"
        )
    ranks = [data[f"{name}_low_rank_dim"] for name in ("decay", "a", "gate", "v")]
    first, other = (Rwkv7(d // head_dim, head_dim, *ranks[:3], v_rank=rank) for rank in (None, ranks[3]))
    mixers = [ChannelMix() if i % 2 else other if i else first for i in range(layers)]
    return {
        "mixers": tuple(mixers),
        "mlps": (NoMLP(),) * layers,
        "rope": Rope(kind="none"),
        "centred": True,
        "norm_bias": True,
        "embed_norm": bool(data["norm_first"]),
        "activation": "relu2",
    }


def write_rwkv7(config: Config) -> dict[str, Any]:
    first, other = config.mixers[0], config.mixers[min(2, config.layers - 2)]
    assert isinstance(first, Rwkv7) and isinstance(other, Rwkv7)
    return {
        "num_hidden_layers": config.layers // 2,
        "hidden_act": "sqrelu",
        "hidden_ratio": int_if_whole(config.d_ff / config.d_model),
        "num_heads": first.heads,
        "decay_low_rank_dim": first.decay_rank,
        "a_low_rank_dim": first.rate_rank,
        "gate_low_rank_dim": first.gate_rank,
        "v_low_rank_dim": other.v_rank or 32,
        "value_dim": [config.d_model] * (config.layers // 2),
        "norm_eps": config.norm_eps,
        "norm_bias": config.norm_bias,
        "norm_first": config.embed_norm,
        "head_norm_eps": EPS,
    }


def rwkv7(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    d, time = config.d_model, layer % 2 == 0
    for end in ("weight", "bias"):
        leaf = "attn_norm" if end == "weight" else "attn_norm_bias"
        yield f"{'attn' if time else 'ffn'}_norm.{end}", whole(leaf, d)
    if not time:
        yield "ffn.x_k", whole("mix_k", d)
        yield "ffn.key.weight", whole("k", config.d_ff)
        yield "ffn.value.weight", whole("v", d)
        return
    word = mixer_of(config, layer)
    assert isinstance(word, Rwkv7)
    sizes = word.shapes(config)
    for letter in "rwkvag":
        yield f"attn.x_{letter}", [TensorRows(f"mix_{letter}", np.arange(d), shape=(1, 1, d))]
    for name, leaf in (("w", "decay"), ("a", "rate"), ("g", "out_gate"), ("v", "first")):
        if f"{leaf}_down" not in sizes:
            continue
        yield f"attn.{name}_lora.lora.0.weight", whole(f"{leaf}_down", sizes[f"{leaf}_down"][-1])
        yield f"attn.{name}_lora.lora.2.weight", whole(f"{leaf}_up", sizes[f"{leaf}_up"][-1])
        if f"{leaf}_up_bias" in sizes:
            yield f"attn.{name}_lora.lora.2.bias", whole(f"{leaf}_up_bias", d)
    yield "attn.k_k", whole("erase_norm", d)
    yield "attn.k_a", whole("key_rate", d)
    yield "attn.r_k", [TensorRows("bonus", np.arange(word.head_dim), transposed=True)]
    for letter in "rkvo":
        yield f"attn.{letter}_proj.weight", whole(letter, sizes[letter][-1])
    yield "attn.g_norm.weight", whole("out_norm", d)
    yield "attn.g_norm.bias", whole("out_norm_bias", d)
