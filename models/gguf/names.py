"""Names of tensors in GGUF, by their names in a Hugging Face checkpoint."""

from __future__ import annotations

import re

from kvjax.models.config import Config
from kvjax.models.gguf.reader import Gguf

_TOP = {
    "embed_tokens": "token_embd",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
    "embeddings": "token_embd",
    "norm": "output_norm",
    "norm_f": "output_norm",
    "embedding_norm": "token_embd_norm",
    "final_layernorm": "output_norm",
    "layers.0.pre_norm": "token_embd_norm",
    "lm_head": "output",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "post_per_layer_input_norm": "post_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "router.proj": "ffn_gate_inp",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "operator_norm": "attn_norm",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    **{f"mixer.{part}_proj": f"attn_{part}" for part in "qkv"},
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "pre_ff_layernorm": "ffn_norm",
    "mamba.x_proj": "ssm_x",
    "mamba.dt_proj": "ssm_dt",
    **{f"mamba.{part}_layernorm": f"ssm_{part}_norm" for part in ("dt", "b", "c")},
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.correction_coefs": "altup_correct_coef",
    **{f"self_attn.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    **{f"self_attn.{part}_proj": f"ssm_{part}" for part in ("f_a", "f_b", "g_a", "g_b")},
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
}
_WHOLE = {
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "self_attn.sinks": "attn_sinks.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "block_sparse_moe.output_linear.weight": "ffn_down_exps.weight",
    "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "self_attn.A_log": "ssm_a",
    "self_attn.dt_bias": "ssm_dt.bias",
    "ffn.x_k": "channel_mix_lerp_k.weight",
    **{f"attn.{name}": f"time_mix_{name}.weight" for name in ("k_k", "k_a", "r_k")},
    **{f"attn.{n}_lora.lora.2.bias": f"time_mix_{n}0.weight" for n in "wav"},
    **{f"attn.{n}_lora.lora.0.weight": f"time_mix_{n}1.weight" for n in "wavg"},
    **{f"attn.{n}_lora.lora.2.weight": f"time_mix_{n}2.weight" for n in "wavg"},
}
_STATE = re.compile(r"(?:mixer|mamba|linear_attn)\.(in_proj|conv1d|norm|out_proj|dt_bias|A_log|D)(\..+)?")
_STATES = {
    "in_proj": "ssm_in",
    "conv1d": "ssm_conv1d",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "D": "ssm_d",
}
_MLP = re.compile(r"(?:mlp|feed_forward|block_sparse_moe)\.(shared_experts?\.)?(gate|up|down)_proj")
_EXPERT = re.compile(
    r"(?:mlp|block_sparse_moe|feed_forward|mixer)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)"
)
_ONE_OF = re.compile(r"(?:layers\.(\d+)\.attn\.x_([rwkvag])|altup_(unembed_)?projections\.(\d+)\.weight)")
_MIXTRAL = {"w1": "gate", "w2": "down", "w3": "up"}
_SECOND = "post_attention_layernorm"
# The norm before the feed-forward, which most name after attention, has three names in GGUF.
_AFTER_ATTENTION = {"gpt-oss", "glm4moe", "seed_oss", "qwen3next", "qwen35", "qwen35moe"}
_BY_ARCHITECTURE = {
    "rwkv7": {
        "ffn_norm": "attn_norm_2",
        "ffn.key": "channel_mix_key",
        "ffn.value": "channel_mix_value",
        "attn.g_norm": "time_mix_ln",
        "attn.r_proj": "time_mix_receptance",
        "attn.k_proj": "time_mix_key",
        "attn.v_proj": "time_mix_value",
        "attn.o_proj": "time_mix_output",
    },
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        _SECOND: "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
    **{name: {_SECOND: "post_attention_norm"} for name in _AFTER_ATTENTION},
}


def gguf_name(name: str, architecture: str, config: Config) -> str:
    """Translate the Hugging Face name, without prefix, of a tensor stored by itself to its name in GGUF."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, layer, inner = name.split(".", 2)
    if inner in _WHOLE:
        return f"blk.{layer}.{_WHOLE[inner]}"
    if architecture == "falcon-h1" and inner == "pre_ff_layernorm.weight":
        # This one name has no suffix.
        return f"blk.{layer}.ffn_norm"
    if (state := _STATE.fullmatch(inner)) is not None:
        return f"blk.{layer}.{_STATES[state[1]]}{state[2] or ''}"
    stem, _, kind = inner.rpartition(".")
    own = _BY_ARCHITECTURE.get(architecture, {})
    if stem in own:
        found = own[stem]
    elif stem == _SECOND:
        found = "ffn_norm" if config.norms == "pre" else "post_attention_norm"
    elif (dense := _MLP.fullmatch(stem)) is not None:
        found = f"ffn_{dense[2]}{'_shexp' if dense[1] else ''}"
    else:
        found = _LAYER.get(stem, stem)
    return f"blk.{layer}.{found}.{kind}"


def expert_of(name: str) -> tuple[str, str, int] | None:
    """Return (layer, one of gate, up and down, expert) of a tensor of one expert; None for any other."""
    _, layer, inner = (name.split(".", 2) + ["", ""])[:3]
    found = _EXPERT.fullmatch(inner.removesuffix(".weight"))
    if found is None:
        return None
    return layer, _MIXTRAL.get(found[2], found[2].removesuffix("_proj")), int(found[1])


def stacked(name: str) -> tuple[str, int] | None:
    """(tensor that holds several, which of them) of RWKV-7's mixes and Gemma 3n's projections; else None."""
    if (found := _ONE_OF.fullmatch(name)) is None:
        return None
    layer, letter, back, number = found.groups()
    if letter is not None:
        return f"blk.{layer}.time_mix_lerp_fused.weight", "rwkvag".index(letter)
    return f"altup_{'unembd_' if back else ''}proj.weight", int(number)


def concatenated(name: str, file: Gguf) -> list[str]:
    """List a file's tensors that are concatenated to a tensor of a checkpoint; none for other names."""
    layer = f"blk.{name.split('.')[1]}" if name.startswith("layers.") else ""
    if name.endswith("linear_attn.in_proj_qkvz.weight"):
        return [f"{layer}.attn_qkv.weight", f"{layer}.attn_gate.weight"]
    if name.endswith("block_sparse_moe.input_linear.weight"):
        return [f"{layer}.ffn_gate_exps.weight", f"{layer}.ffn_up_exps.weight"]
    beside = "_shexp" if f"{layer}.ffn_gate_shexp.weight" in file.tensors else ""
    if name.endswith("shared_mlp.input_linear.weight"):
        return [f"{layer}.ffn_gate{beside}.weight", f"{layer}.ffn_up{beside}.weight"]
    if name.endswith("shared_mlp.output_linear.weight"):
        return [f"{layer}.ffn_down{beside}.weight"]
    return []
