"""Nemotron-H and Nemotron 3: layers that are Mamba-2, attention, experts or an MLP alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.feed_forward import MLP, FeedForward, LatentMoE, NoMLP, mlp_of
from kvjax.models.hf_family import Json, TensorRows
from kvjax.models.hf_mixed.mamba2 import mamba2_block
from kvjax.models.hf_mixed.pieces import attention, whole
from kvjax.models.mixer import Mixer
from kvjax.models.mixers.attention import Attention, mixer_of
from kvjax.models.mixers.dropped import Dropped
from kvjax.models.mixers.mamba2 import Mamba2
from kvjax.ops.base.rope import Rope

_LETTERS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def spell_nemotron_h(data: Json) -> dict[str, Any]:
    """Spell the kind of every layer, which older files give as a word of letters."""
    kinds = data.get("layers_block_type") or data.get("layer_types")
    if kinds is None:
        kinds = [_LETTERS.get(letter, letter) for letter in data["hybrid_override_pattern"]]
    kinds = [_KINDS.get(str(kind), str(kind)) for kind in kinds]
    if unknown := sorted({*kinds} - {*_LETTERS.values()}):
        raise InputError(
            f"layers_block_type names {', '.join(unknown)}, expected {', '.join(_LETTERS.values())}"
        )
    others = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"}
    return {
        "layers_block_type": kinds,
        "num_hidden_layers": len(kinds),
        "rms_norm_eps": data["layer_norm_epsilon"],
        "hidden_act": data["mlp_hidden_act"],
        **{ours: data[theirs] for theirs, ours in others.items() if theirs in data},
    }


def read_nemotron_h(data: Json, rope: Rope) -> dict[str, Any]:
    """Read its steps as not clamped, like the authors' kernels; transformers clamps to `time_step_min`."""
    if data["use_bias"] or not data["use_conv_bias"] or data["n_group"] != 1:
        raise InputError(
            "use_bias = true, use_conv_bias = false or n_group other than 1 is not supported for nemotron_h"
        )
    state = Mamba2(
        data["mamba_num_heads"], data["ssm_state_size"], data["mamba_head_dim"], data["n_groups"],
        conv=data["conv_kernel"], norm_groups=data["n_groups"],
    )  # fmt: skip
    moe = LatentMoE(
        data["n_routed_experts"], data["num_experts_per_tok"], data["moe_intermediate_size"],
        scores="sigmoid", normalise=bool(data["norm_topk_prob"]), scale=float(data["routed_scaling_factor"]),
        shared=data["moe_shared_expert_intermediate_size"], latent=data.get("moe_latent_size"),
    )  # fmt: skip
    words: dict[str, tuple[Mixer, FeedForward]] = {
        "linear_attention": (state, NoMLP()),
        "full_attention": (Attention(), NoMLP()),
        "moe": (Dropped(), moe),
        "mlp": (Dropped(), MLP()),
    }
    both = [words[kind] for kind in data["layers_block_type"]]
    return {
        "mixers": tuple(mixer for mixer, _ in both),
        "mlps": tuple(mlp for _, mlp in both),
        "rope": Rope(kind="none"),
        "mlp_bias": bool(data["mlp_bias"]),
    }


def write_nemotron_h(config: Config) -> dict[str, Any]:
    kinds = []
    for mixer, mlp in zip(config.mixers, config.mlps, strict=True):
        alone = "moe" if isinstance(mlp, LatentMoE) else "mlp"
        kinds.append(
            "linear_attention" if isinstance(mixer, Mamba2)
            else "full_attention" if isinstance(mixer, Attention) else alone
        )  # fmt: skip
    state = next(word for word in config.mixers if isinstance(word, Mamba2))
    moe = next((word for word in config.mlps if isinstance(word, LatentMoE)), None)
    out: dict[str, Any] = {
        "layers_block_type": kinds,
        "mamba_num_heads": state.heads,
        "ssm_state_size": state.key_dim,
        "mamba_head_dim": state.value_dim,
        "n_groups": state.key_heads,
        "conv_kernel": state.conv,
        "layer_norm_epsilon": config.norm_eps,
        "mlp_bias": config.mlp_bias,
        "attention_bias": False,
        "time_step_min": 1e-12,
    }
    if moe is not None:
        out |= {
            "n_routed_experts": moe.experts,
            "num_experts_per_tok": moe.top,
            "moe_intermediate_size": moe.width,
            "moe_shared_expert_intermediate_size": moe.shared,
            "moe_latent_size": moe.latent,
            "norm_topk_prob": moe.normalise,
            "routed_scaling_factor": moe.scale,
        }
    return out


def nemotron_h(config: Config, layer: int) -> Iterator[tuple[str, list[TensorRows]]]:
    mixer, word, d = mixer_of(config, layer), mlp_of(config, layer), config.d_model
    yield "norm.weight", whole("mlp_norm" if isinstance(mixer, Dropped) else "attn_norm", d)
    if isinstance(mixer, Mamba2):
        yield from mamba2_block(config, layer, "mixer")
    elif isinstance(mixer, Attention):
        for name, pieces in attention(config, layer):
            yield name.replace("self_attn.", "mixer."), pieces
    elif isinstance(word, LatentMoE):
        yield from _experts(word, config)
    else:
        sizes = word.shapes(config)
        for leaf in sizes:
            name, kind = leaf.removesuffix("_bias"), "bias" if leaf.endswith("_bias") else "weight"
            yield f"mixer.{name}_proj.{kind}", whole(leaf, sizes[leaf][-1])


def _experts(word: LatentMoE, config: Config) -> Iterator[tuple[str, list[TensorRows]]]:
    sizes = word.shapes(config)
    yield "mixer.gate.weight", whole("router", word.experts)
    yield "mixer.gate.e_score_correction_bias", whole("router_bias", word.experts)
    for leaf in ("up", "down"):
        for e in range(word.experts):
            name = f"experts_{leaf}"
            yield f"mixer.experts.{e}.{leaf}_proj.weight", whole(name, sizes[name][-1], e)
        if word.shared:
            name = f"shared_{leaf}"
            yield f"mixer.shared_experts.{leaf}_proj.weight", whole(name, sizes[name][-1])
    if word.latent:
        yield "mixer.fc1_latent_proj.weight", whole("latent_down", word.latent)
        yield "mixer.fc2_latent_proj.weight", whole("latent_up", config.d_model)
