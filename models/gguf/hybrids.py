"""Config of files with layers of a state or of short convolutions beside attention."""

from __future__ import annotations

from collections.abc import Callable

from kvjax.base.errors import InputError
from kvjax.models.gguf.dense import multipliers
from kvjax.models.gguf.fields import Json, attention, depth, routed, same, with_kv_heads
from kvjax.models.gguf.reader import Gguf


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
    """Granite 4: Mamba-2 in most layers, with experts or not."""
    if file.of("attention.scale") is None:
        raise InputError(
            f"{file.path} holds Bamba under the architecture of Granite 4, which is not read from GGUF: "
            "give the directory from the Hugging Face hub"
        )
    inner, heads = file.need("ssm.inner_size"), file.need("ssm.time_step_rank")
    data = {"model_type": "granitemoehybrid", **attention(file), **multipliers(file)} | {
        "layer_types": with_kv_heads(file, "attention", "mamba"),
        "position_embedding_type": "rope" if file.of("rope.scaling.finetuned", False) else "nope",
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": file.of("ssm.group_count", 1),
        "mamba_d_state": file.need("ssm.state_size"),
        "mamba_d_conv": file.need("ssm.conv_kernel"),
        "mamba_expand": inner / file.need("embedding_length"),
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "num_local_experts": file.of("expert_count", 0),
        "num_experts_per_tok": file.of("expert_used_count", 0),
    }
    shared = file.of("expert_shared_feed_forward_length", data["intermediate_size"])
    return data | {"shared_intermediate_size": shared}


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
    """The kind of a layer of Nemotron-H."""
    marks = {"ssm_in": "M", "attn_q": "*", "ffn_gate_inp": "E"}
    kinds = (letter for name, letter in marks.items() if f"blk.{layer}.{name}.weight" in file.tensors)
    return next(kinds, "-")
