"""Settings that the metadata of many architectures give alike, under the names of a config.json."""

from __future__ import annotations

from typing import Any

from kvjax.base.errors import InputError
from kvjax.models.gguf.reader import Gguf
from kvjax.models.gguf.rope import rope_fields

Json = dict[str, Any]

_ATTENTION = {
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
SIGMOID = 2
"""The code of experts that are chosen by sigmoids."""


def attention(file: Gguf, partial: bool = False, each_layer: tuple[str, ...] = ()) -> Json:
    """Sizes of attention and of dense feed-forwards, and their rotation.

    partial: whether a head may rotate in some of its channels only, for which `partial_rotary_factor` is
    given then. each_layer: sizes that may differ by layer, which are left out.
    """
    data = {name: same(file, key) for name, key in _ATTENTION.items() if name not in each_layer}
    heads = data["num_attention_heads"]
    data["num_key_value_heads"] = same(file, "attention.head_count_kv", heads)
    data["head_dim"] = file.of("attention.key_length", file.need("embedding_length") // max(heads, 1))
    if (values := file.of("attention.value_length", data["head_dim"])) != data["head_dim"]:
        raise InputError(
            f"{file.path} has keys of {data['head_dim']} and values of {values} channels, which no family "
            f"of {file.architecture} that is read here has"
        )
    data["attention_bias"] = file.holds("attn_q.bias")
    rotated = file.of("rope.dimension_count", data["head_dim"]) if partial else data["head_dim"]
    if partial:
        data["partial_rotary_factor"] = rotated / data["head_dim"]
    return data | rope_fields(file, rotated)


def same(file: Gguf, key: str, default: Any = None) -> Any:
    """Return the value of a key that may have one entry per layer, if all layers have the same.

    Layers without any, such as those of a state without KV heads, have 0 and do not count.
    """
    value = file.need(key) if default is None else file.of(key, default)
    if not isinstance(value, list):
        return value
    if len(found := set(value) - {0}) == 1:
        return found.pop()
    raise InputError(f"{file.path} gives its layers different {key}, expected one value for all of them")


def windows(file: Gguf, every: int) -> Json:
    """Return a window and the layers that have it: as the file says, or all but every `every`-th."""
    window, layers = file.of("attention.sliding_window") or None, depth(file)
    given = file.of("attention.sliding_window_pattern", every)
    if isinstance(given, list):
        inside = [bool(flag) for flag in given[:layers]]
    else:
        inside = [(i + 1) % given != 0 for i in range(layers)]
    kinds = ["sliding_attention" if window and flag else "full_attention" for flag in inside]
    return {"sliding_window": window, "layer_types": kinds}


def depth(file: Gguf) -> int:
    """How many layers predict the next token; those for later tokens, at the end, do not count."""
    return int(file.need("block_count")) - int(file.of("nextn_predict_layers", 0))


def with_kv_heads(file: Gguf, there: str, other: str) -> list[str]:
    """Return the kind of each layer: `there` if it has KV heads, `other` if it has none."""
    heads = file.need("attention.head_count_kv")
    if not isinstance(heads, list) or len(heads) < depth(file):
        raise InputError(
            f"{file.path} gives attention.head_count_kv = {heads}, expected one for each of its "
            f"{depth(file)} layers"
        )
    return [there if heads[i] else other for i in range(depth(file))]


def routed(file: Gguf, count: str) -> Json:
    """How many experts there are, as `count` of the config.json, how many a token takes, and their width."""
    return {
        count: file.need("expert_count"),
        "num_experts_per_tok": file.need("expert_used_count"),
        "moe_intermediate_size": file.of("expert_feed_forward_length", file.of("feed_forward_length")),
    }
