"""Config of files with layers of a state or of short convolutions beside attention."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvjax.base.errors import InputError
from kvjax.models.gguf.dense import multipliers
from kvjax.models.gguf.experts import latent
from kvjax.models.gguf.fields import Json, attention, depth, routed, same, with_kv_heads
from kvjax.models.gguf.reader import Gguf
from kvjax.models.hf_mixed.hybrids import period
from kvjax.models.hf_numbers import int_if_whole
from kvjax.models.mixers.rwkv import EPS


def mamba2(file: Gguf) -> Json:
    """Mamba-2 alone."""
    inner, heads = file.need("ssm.inner_size"), file.need("ssm.time_step_rank")
    return {
        "model_type": "mamba2",
        "num_heads": heads,
        "head_dim": inner // heads,
        "expand": inner / file.need("embedding_length"),
        "state_size": file.need("ssm.state_size"),
        "n_groups": file.of("ssm.group_count", 1),
        "conv_kernel": file.need("ssm.conv_kernel"),
        "layer_norm_epsilon": file.need("attention.layer_norm_rms_epsilon"),
    }


def gated_delta(model_type: str) -> Callable[[Gguf], Json]:
    """Qwen3-Next and Qwen3.5: Gated DeltaNet in three of four layers, with experts or not."""

    def read(file: Gguf) -> Json:
        data = attention(file, partial=True)
        rotation = ("rope_theta", "partial_rotary_factor")
        data["rope_parameters"] = {name: data[name] for name in rotation} | (
            data.pop("rope_scaling", {"rope_type": "default"})
        )
        heads, every = file.need("ssm.time_step_rank"), file.of("full_attention_interval", 4)
        layers = depth(file)
        linear = file.of("attention.recurrent_layers", [(i + 1) % every != 0 for i in range(layers)])
        data |= {
            "linear_conv_kernel_dim": file.need("ssm.conv_kernel"),
            "linear_key_head_dim": file.need("ssm.state_size"),
            "linear_num_key_heads": file.need("ssm.group_count"),
            "linear_num_value_heads": heads,
            "linear_value_head_dim": file.need("ssm.inner_size") // heads,
            "layer_types": ["linear_attention" if flag else "full_attention" for flag in linear[:layers]],
        }
        if file.of("expert_count", 0):
            shared = file.need("expert_shared_feed_forward_length")
            data |= routed(file, "num_experts") | {"norm_topk_prob": True}
            data |= {"shared_expert_intermediate_size": shared}
        return {"model_type": model_type, **data}

    return read


def lfm2(file: Gguf) -> Json:
    """LFM2, with experts or not."""
    data = attention(file) | {
        "norm_eps": file.need("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": file.need("shortconv.l_cache"),
        "conv_bias": file.holds("shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": with_kv_heads(file, "full_attention", "conv"),
    }
    if not file.of("expert_count", 0):
        return {"model_type": "lfm2", **data}
    data |= routed(file, "num_experts") | {
        "num_dense_layers": file.of("leading_dense_block_count", 0),
        "use_expert_bias": file.holds("exp_probs_b.bias"),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }
    return {"model_type": "lfm2_moe", **data}


def granite_hybrid(file: Gguf) -> Json:
    """Granite 4: Mamba-2 in most layers, with experts or not. Or Bamba, which has no scale of attention."""
    if file.of("attention.scale") is None:
        return _bamba(file)
    data = {"model_type": "granitemoehybrid", **attention(file), **multipliers(file), **_mamba_2(file)} | {
        "layer_types": with_kv_heads(file, "attention", "mamba"),
        "position_embedding_type": "rope" if file.of("rope.scaling.finetuned", False) else "nope",
        "num_local_experts": file.of("expert_count", 0),
        "num_experts_per_tok": file.of("expert_used_count", 0),
    }
    shared = file.of("expert_shared_feed_forward_length", data["intermediate_size"])
    return data | {"shared_intermediate_size": shared}


def _bamba(file: Gguf) -> Json:
    kinds = with_kv_heads(file, "attention", "mamba")
    data = attention(file, partial=True)
    # Files of configs without attn_rotary_emb give all channels; the model rotates half of them all the same.
    if data.pop("partial_rotary_factor") not in (0.5, 1.0) or not file.of("rope.scaling.finetuned", False):
        raise InputError(
            f"{file.path} has no attention.scale, and rotates {file.of('rope.dimension_count')} channels of "
            "a head: expected Bamba, which rotates half of them, or Granite 4 with its attention.scale"
        )
    return {
        "model_type": "bamba", **data, **_mamba_2(file), "mlp_bias": file.holds("ffn_up.bias"),
        "attn_layer_indices": [i for i, kind in enumerate(kinds) if kind == "attention"],
    }  # fmt: skip


def _mamba_2(file: Gguf) -> Json:
    """Sizes of Mamba-2 layers, as Granite 4, Bamba and Falcon-H1 name them."""
    inner, heads = file.need("ssm.inner_size"), file.need("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": file.of("ssm.group_count", 1),
        "mamba_d_state": file.need("ssm.state_size"),
        "mamba_d_conv": file.need("ssm.conv_kernel"),
        "mamba_expand": int_if_whole(inner / file.need("embedding_length")),
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }


def falcon_h1(file: Gguf) -> Json:
    """Falcon-H1. The converter multiplies tensors by the model's factors, which are all 1 then."""
    if "output.weight" not in file.tensors:
        raise InputError(
            f"{file.path} lacks output.weight: of a Falcon-H1 with tied embeddings, llama.cpp's converter "
            "loses lm_head_multiplier. Give the directory from the Hugging Face hub"
        )
    return {
        "model_type": "falcon_h1",
        **attention(file),
        **_mamba_2(file),
        "mamba_d_ssm": file.need("ssm.inner_size"),
        "mamba_rms_norm": file.holds("ssm_norm.weight"),
        # As llama.cpp computes it.
        "mamba_norm_before_gate": False,
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0] * 2,
    }


def jamba(file: Gguf) -> Json:
    """Jamba. Layers with KV heads are attention, those with a router have experts."""
    layers = range(depth(file))
    attends = [i for i, kind in enumerate(with_kv_heads(file, "attention", "mamba")) if kind == "attention"]
    sparse = [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" in file.tensors]
    return {
        "model_type": "jamba",
        **attention(file),
        **period("attn", attends, len(layers)),
        **period("expert", sparse, len(layers)),
        "num_experts": file.need("expert_count") if sparse else 1,
        "num_experts_per_tok": file.of("expert_used_count", 1),
        "mamba_d_state": file.need("ssm.state_size"),
        "mamba_d_conv": file.need("ssm.conv_kernel"),
        "mamba_expand": int_if_whole(file.need("ssm.inner_size") / file.need("embedding_length")),
        "mamba_dt_rank": file.need("ssm.time_step_rank"),
    }


def kimi_linear(file: Gguf) -> Json:
    """Kimi Linear: KDA in layers without KV heads, latents without rotation in the others."""
    layers = range(depth(file))
    kinds = with_kv_heads(file, "full", "kda")
    delta = [i + 1 for i, kind in enumerate(kinds) if kind == "kda"]
    sparse = [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" in file.tensors]
    # One head has one rate of decay.
    rates = file.tensors.get(f"blk.{delta[0] - 1 if delta else 0}.ssm_a")
    if rates is None:
        raise InputError(f"{file.path} lacks ssm_a in its layers without KV heads: convert it again")
    return {
        "model_type": "kimi_linear",
        **latent(file),
        "mla_use_nope": True,
        "num_experts": file.of("expert_count", 0),
        "num_experts_per_token": file.of("expert_used_count", 0),
        "num_shared_experts": file.of("expert_shared_count", 0),
        "moe_intermediate_size": file.of("expert_feed_forward_length"),
        # Files do not say so: llama.cpp normalises, too.
        "moe_renormalize": True,
        "routed_scaling_factor": float(file.of("expert_weights_scale", 1.0)),
        "num_expert_group": file.of("expert_group_count", 1),
        "topk_group": file.of("expert_group_used_count", 1),
        "first_k_dense_replace": sparse[0] if sparse else len(layers),
        "moe_layer_freq": sparse[1] - sparse[0] if len(sparse) > 1 else (sparse or [0])[0] or len(layers),
        "linear_attn_config": {
            "kda_layers": delta,
            "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "full"],
            "num_heads": int(np.prod(rates.shape)),
            "head_dim": file.need("kda.head_dim"),
            "short_conv_kernel_size": file.need("ssm.conv_kernel"),
        },
    }


def rwkv7(file: Gguf) -> Json:
    """RWKV-7."""
    return {
        "model_type": "rwkv7",
        "head_dim": file.need("wkv.head_size"),
        "intermediate_size": file.need("feed_forward_length"),
        "norm_eps": file.need("attention.layer_norm_epsilon"),
        "head_norm_eps": EPS,
        "norm_first": "token_embd_norm.weight" in file.tensors,
        "decay_low_rank_dim": file.need("attention.decay_lora_rank"),
        "a_low_rank_dim": file.need("attention.iclr_lora_rank"),
        "v_low_rank_dim": file.need("attention.value_residual_mix_lora_rank"),
        "gate_low_rank_dim": file.need("attention.gate_lora_rank"),
    }


def nemotron_h(file: Gguf) -> Json:
    """Nemotron-H and Nemotron 3. Tensors say whether a layer is Mamba-2, attention, experts or an MLP."""
    inner, heads = file.need("ssm.inner_size"), file.need("ssm.time_step_rank")
    layers = range(depth(file))
    dense = [name for i in layers if (name := f"blk.{i}.ffn_up.weight") in file.tensors]
    width = file.tensors[dense[0]].shape[0] if dense else same(file, "feed_forward_length")
    data = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "".join(_letter(file, i) for i in layers),
        "num_attention_heads": same(file, "attention.head_count"),
        "num_key_value_heads": same(file, "attention.head_count_kv"),
        "head_dim": file.need("attention.key_length"),
        "intermediate_size": width,
        "layer_norm_epsilon": file.need("attention.layer_norm_epsilon"),
        "mlp_bias": file.holds("ffn_up.bias"),
        "mlp_hidden_act": "relu2",
        "ssm_state_size": file.need("ssm.state_size"),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": file.of("ssm.group_count", 1),
        "conv_kernel": file.need("ssm.conv_kernel"),
    }
    if not file.of("expert_count", 0):
        return data
    return (
        data
        | routed(file, "n_routed_experts")
        | {
            "moe_shared_expert_intermediate_size": file.need("expert_shared_feed_forward_length"),
            "moe_latent_size": file.of("moe_latent_size"),
            "routed_scaling_factor": float(file.of("expert_weights_scale", 1.0)),
            "norm_topk_prob": bool(file.of("expert_weights_norm", False)),
            "n_group": file.of("expert_group_count", 1),
        }
    )


def _letter(file: Gguf, layer: int) -> str:
    """Return the kind of a layer of Nemotron-H."""
    marks = {"ssm_in": "M", "attn_q": "*", "ffn_gate_inp": "E"}
    kinds = (letter for name, letter in marks.items() if f"blk.{layer}.{name}.weight" in file.tensors)
    return next(kinds, "-")
