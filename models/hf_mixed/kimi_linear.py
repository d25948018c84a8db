"""Kimi Linear: layers of KDA, layers of latents without positions, and experts.

transformers has a class since 5.24, whose logits are equal (tests/parity/test_converted_gguf.py).
This module follows the authors' own files, modeling_kimi.py and
configuration_kimi.py of Kimi-Linear-48B-A3B, in copies of them that other public projects keep, and agrees
with vLLM's kimi_linear.py and kda.py: names and shapes of all tensors, layers counted from one in
linear_attn_config, no rotation and no latent of the queries in full layers, the gate of KDA without a bias,
which layers have experts, and the router (DeepSeek-V3's). The sources differ once: the authors normalise the
latent with eps 1e-6 whatever rms_norm_eps is, vLLM with rms_norm_eps; this follows the authors.

No published checkpoint was at hand: names and shapes are those that the classes declare. Settings
that the authors' class accepts and kvjax does not support are refused: a softmax router with a correction
bias, and the additions of later models with the same model_type (bounded decays, gates of the latent
attention).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.feed_forward import FeedForward, GatedMLP, MoE
from kvjax.models.hf_family import Json, TensorRows
from kvjax.models.hf_mixed.deepseek import latent_attention
from kvjax.models.hf_mixed.pieces import mlp, norms, whole
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.mixers.latent import Latent
from kvjax.models.mixers.recurrent import KimiDelta
from kvjax.ops.base.rope import Rope


def read_kimi_linear(data: Json, rope: Rope) -> dict[str, Any]:
    _check(data)
    linear, layers = data["linear_attn_config"], range(data["num_hidden_layers"])
    width = linear["head_dim"]
    delta = KimiDelta(
        linear["num_heads"], width, width, conv=linear["short_conv_kernel_size"], gate_bias=False
    )
    latent = Latent(
        data["kv_lora_rank"], data["qk_rope_head_dim"], data["qk_nope_head_dim"], data["v_head_dim"],
        turns=False,
    )  # fmt: skip
    return {
        "mixers": tuple(delta if i + 1 in linear["kda_layers"] else latent for i in layers),
        "mlps": _feed_forwards(data),
        "rope": Rope(kind="none"),
        "kv_heads": data["num_attention_heads"],
        "max_positions": data.get("model_max_length", data["max_position_embeddings"]),
    }


def _check(data: Json) -> None:
    """Raise InputError if the config has unsupported settings, or does not say what every layer is."""
    linear = data["linear_attn_config"]
    asked = {
        "mla_use_nope": (data.get("mla_use_nope", False), True),
        "q_lora_rank": (data.get("q_lora_rank"), None),
        "moe_router_activation_func": (data["moe_router_activation_func"], "sigmoid"),
        "mla_use_output_gate": (data.get("mla_use_output_gate", False), False),
        "gate_lower_bound": (linear.get("gate_lower_bound"), None),
    }
    for name, (given, expected) in asked.items():
        if given != expected:
            raise InputError(f"{name} = {given!r} is not supported for kimi_linear, expected {expected!r}")
    kinds, layers = (linear["kda_layers"], linear["full_attn_layers"]), data["num_hidden_layers"]
    if sorted([*kinds[0], *kinds[1]]) != list(range(1, layers + 1)):
        raise InputError(
            f"kda_layers {kinds[0]} and full_attn_layers {kinds[1]} must name each of the layers 1 to "
            f"{layers} once"
        )


def _feed_forwards(data: Json) -> tuple[FeedForward, ...]:
    """Experts in every `moe_layer_freq`-th layer after the dense ones."""
    layers, dense = data["num_hidden_layers"], GatedMLP()
    if not data.get("num_experts"):
        return (dense,) * layers
    top, width = data["num_experts_per_token"], data["moe_intermediate_size"]
    experts = MoE(
        data["num_experts"], top, width,
        scores="sigmoid",
        # A single weight is not normalised.
        normalise=top > 1 and bool(data["moe_renormalize"]),
        scale=float(data["routed_scaling_factor"]),
        groups=data["num_expert_group"],
        top_groups=data["topk_group"],
        shared=width * data["num_shared_experts"],
    )  # fmt: skip
    first, every = data["first_k_dense_replace"], data["moe_layer_freq"]
    return tuple(experts if i >= first and i % every == 0 else dense for i in range(layers))


def write_kimi_linear(config: Config) -> dict[str, Any]:
    delta = [m for m in config.mixers if isinstance(m, KimiDelta)][0]
    latent = [m for m in config.mixers if isinstance(m, Latent)][0]
    kinds = [isinstance(m, KimiDelta) for m in config.mixers]
    out: dict[str, Any] = {
        "head_dim": config.d_model // config.heads,
        "model_max_length": config.max_positions,
        "linear_attn_config": {
            "kda_layers": [i + 1 for i, linear in enumerate(kinds) if linear],
            "full_attn_layers": [i + 1 for i, linear in enumerate(kinds) if not linear],
            "num_heads": delta.heads,
            "head_dim": delta.key_dim,
            "short_conv_kernel_size": delta.conv,
        },
        "mla_use_nope": not latent.turns,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.rank,
        "qk_rope_head_dim": latent.rope_dim,
        "qk_nope_head_dim": latent.nope_dim,
        "v_head_dim": latent.value_dim,
    }
    sparse = [i for i, word in enumerate(config.mlps) if isinstance(word, MoE)]
    if not sparse:
        return out
    moe = [word for word in config.mlps if isinstance(word, MoE)][0]
    # If only one layer has experts, its own index is a step that hits no other layer below twice the index.
    step = sparse[1] - sparse[0] if len(sparse) > 1 else sparse[0] or config.layers
    return out | {
        "num_experts": moe.experts,
        "num_experts_per_token": moe.top,
        "moe_intermediate_size": moe.width,
        "moe_router_activation_func": moe.scores,
        "moe_renormalize": moe.normalise,
        "routed_scaling_factor": moe.scale,
        "use_grouped_topk": True,
        "num_expert_group": moe.groups,
        "topk_group": moe.top_groups,
        "num_shared_experts": moe.shared // moe.width,
        "first_k_dense_replace": sparse[0],
        "moe_layer_freq": step,
    }


def kimi_linear(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    word = mixer_of(config, layer)
    yield from norms(config)
    yield from _delta(word, config) if isinstance(word, KimiDelta) else latent_attention(config, layer)
    yield from mlp(config, layer, "shared_experts", "block_sparse_moe", ("w1", "w3", "w2"))


def _delta(word: KimiDelta, config: Config) -> Iterator[tuple[str, list[TensorRows]]]:
    """KDA: three convolutions that are one here, and decay rates with further axes of length one."""
    sizes = word.shapes(config)
    at = 0
    for leaf in ("q", "k", "v"):
        count = sizes[leaf][-1]
        yield f"self_attn.{leaf}_proj.weight", whole(leaf, count)
        yield f"self_attn.{leaf}_conv1d.weight", [whole("conv", count)[0]._replace(at=at)]
        at += count
    [rates] = whole("a_log", word.heads)
    yield "self_attn.A_log", [rates._replace(shape=(1, 1, word.heads, 1))]
    names = {
        "dt_bias": "dt_bias", "f_a_proj.weight": "decay_down", "f_b_proj.weight": "decay_up",
        "b_proj.weight": "beta", "g_a_proj.weight": "out_gate_down", "g_b_proj.weight": "out_gate_up",
        "o_norm.weight": "out_norm", "o_proj.weight": "o",
    }  # fmt: skip
    for name, leaf in names.items():
        yield f"self_attn.{name}", whole(leaf, sizes[leaf][-1])
