"""Tiny models of every family that GGUF names, written by the gguf package as llama.cpp's conversion does.

Names of tensors are the package's own (`get_tensor_name_map`); what the conversion does to numbers is written
here in its direction, from the model on the hub to GGUF.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
from safetensors.numpy import load_file

from kvjax.models.hf import save_hf
from kvjax.models.hf_config import config_from_hf
from kvjax.models.model import Model
from kvjax.models.params import init
from tests.models.hf_cases import CASES as HF
from tests.models.test_kimi_linear import PUBLISHED as KIMI

_ROUTED = {"first_k_dense_replace": 1}


def _case(name: str, **edits: Any) -> dict[str, Any]:
    """Change in a case of `hf_cases` what GGUF cannot say."""
    return {key: value for key, value in (HF[name] | edits).items() if value is not ...}


_NO_WINDOWS = {"use_sliding_window": False, "layer_types": ..., "sliding_window": None}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _case("llama")),
    "llama_tied": ("llama", _case("llama_mqa_tied")),
    "llama_linear": ("llama", _case("llama_linear")),
    "llama_llama3": ("llama", _case("llama_llama3")),
    "llama_yarn": ("llama", _case("llama_yarn")),
    "mixtral": ("llama", _case("mixtral")),
    "qwen2": ("qwen2", _case("qwen2", **_NO_WINDOWS)),
    "qwen2_yarn": ("qwen2", _case("qwen2_yarn", **_NO_WINDOWS)),
    "qwen3": ("qwen3", _case("qwen3", **_NO_WINDOWS)),
    "qwen3_moe": ("qwen3moe", _case("qwen3_moe", decoder_sparse_step=1)),
    "gemma2": ("gemma2", _case("gemma2", query_pre_attn_scalar=8)),
    "gemma3": ("gemma3", _case("gemma3_text")),
    "phi3": ("phi3", _case("phi3")),
    "phi3_tied": ("phi3", _case("phi3_full")),
    "phi3_longrope": ("phi3", _case("phi3_longrope")),
    "olmo2": ("olmo2", _case("olmo2")),
    "deepseek_v2": ("deepseek2", _case("deepseek_v2")),
    "deepseek_v3": (
        "deepseek2", _case("deepseek_v3", rope_scaling=_YARN | {"mscale": 0.8, "mscale_all_dim": 0.8}),
    ),
    "mamba2": ("mamba2", _case("mamba2")),
    "mamba2_groups": ("mamba2", _case("mamba2_groups")),
}  # fmt: skip


RECORDED = Path(__file__).parents[1] / "fixtures" / "converted_gguf.zip"
"""What llama.cpp's converter makes of `CONVERTED` (`scripts/fixtures/record_gguf.py`)."""
_FLAT = {"rope_scaling": ..., "rope_theta": 1000.0}
_NO_BIAS = {"attention_bias": False}
_LATER = {"scoring_func": "sigmoid"}
_NEMOTRON = {"max_position_embeddings": 2**20, "mamba_d_head": 8}
_GRANITE_4 = {"mamba_d_head": 8, "max_position_embeddings": 2**20}
_RWKV = {
    "model_type": "rwkv7", "vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "head_dim": 8,
    "num_hidden_layers": 3, "decay_low_rank_dim": 3, "a_low_rank_dim": 4, "gate_low_rank_dim": 5,
    "v_low_rank_dim": 2, "norm_eps": 1e-5, "head_norm_eps": 64e-5, "max_position_embeddings": 2**20,
}  # fmt: skip
CONVERTED: dict[str, dict[str, Any]] = {name: config for name, (_, config) in CASES.items()} | {
    "gemma3": _case("gemma3_text", sliding_window_pattern=..., num_hidden_layers=7),
    # Published files name the function that chooses experts.
    "deepseek_v3": CASES["deepseek_v3"][1] | {"scoring_func": "sigmoid"},
    "smollm3": _case("smollm3", num_hidden_layers=5, no_rope_layers=..., mlp_bias=False),
    "exaone4": _case("exaone4", **_FLAT),
    "exaone4_full": _case("exaone4_full"),
    "seed_oss": _case("seed_oss"),
    "seed_oss_out": _case("seed_oss_out"),
    "ernie4_5": _case("ernie4_5"),
    "ernie4_5_moe": _case("ernie4_5_moe"),
    "glm4": _case("glm4"),
    "glm4_yarn": _case("glm4_yarn"),
    "olmo3": _case("olmo3"),
    "olmo3_yarn": _case("olmo3_yarn"),
    "granite": _case("granite"),
    "glm4_moe": _case("glm4_moe"),
    "glm4_moe_plain": _case("glm4_moe_plain"),
    "minimax_m2": _case("minimax_m2"),
    "gpt_oss": _case("gpt_oss"),
    "gpt_oss_plain": _case("gpt_oss_pattern", layer_types=...),
    "cohere2": _case("cohere2", **_NO_BIAS, layer_types=..., num_hidden_layers=5, rotary_pct=1.0),
    "ministral3": _case("ministral3"),
    "gemma4": _case("gemma4_text", moe_intermediate_size=None),
    "gemma4_experts": _case("gemma4_experts", num_kv_shared_layers=0),
    "llama4": _case(
        "llama4_text", attention_chunk_size=8192, no_rope_layer_interval=4, floor_scale=8192, attn_scale=0.1
    ),
    "glm_4_flash": _case(
        "glm4_moe_lite", **_LATER, first_k_dense_replace=1, mlp_layer_types=["dense", "sparse", "sparse"]
    ),
    "deepseek_v32": _case("deepseek_v32_picks", **_LATER),
    "glm_5": _case("glm_moe_dsa_picks", **_LATER),
    "glm_5_yarn": _case("glm_moe_dsa", **_LATER, indexer_types=..., rope_scaling=_YARN),
    "nemotron_h": _case("nemotron_h_dense", **_NEMOTRON, num_hidden_layers=4),
    "nemotron_3": _case(
        "nemotron_h", **_NEMOTRON, num_hidden_layers=5, n_group=1, topk_group=1, n_shared_experts=1
    ),
    "lfm2": _case("lfm2", full_attn_idxs=..., layer_types=["conv", "full_attention", "conv"]),
    "lfm2_moe": _case("lfm2_moe", routed_scaling_factor=1.0),
    "qwen3_next": _case("qwen3_next", mlp_only_layers=[]),
    "qwen3_5": _case("qwen3_5_text"),
    "qwen3_5_moe": _case("qwen3_5_moe_text", linear_num_key_heads=2),
    "granite_4": _case("granitemoehybrid", **_GRANITE_4),
    "granite_4_dense": _case("granitemoehybrid_dense", **_GRANITE_4, position_embedding_type="nope"),
    "falcon_h1": _case("falcon_h1", rope_theta=1000.0),
    "falcon_h1_plain": _case("falcon_h1_plain", tie_word_embeddings=False),
    "jamba": _case("jamba"),
    "bamba": _case("bamba", mamba_d_head=8, attn_rotary_emb=2),
    "gemma3n": _case("gemma3n_text", altup_num_inputs=4, vocab_size_per_layer_input=71),
    "kimi_linear": {key: value for key, value in KIMI.items() if key != "rope_scaling"}
    | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    "rwkv7": _RWKV,
}


def checkpoint(config: dict[str, Any], folder: Path, seed: int = 0, rounded: bool = False) -> Path:
    """Write a Hugging Face directory of a config.json with random weights, norms and biases among them.

    rounded: to quarters, which a zip file holds in little room.
    """
    made = config_from_hf(config)
    params = init(made, jax.random.key(seed))
    rng = np.random.default_rng(seed)

    # Layers side by side have one norm in a file: it moves by the same numbers in all of them.
    norm = 0.2 * np.random.default_rng(seed + 1).standard_normal(made.d_model).astype(np.float32)
    alike = config["model_type"] == "falcon_h1"

    def moved(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        shared = alike and getattr(path[-1], "key", "") == "attn_norm"
        new = x + (
            np.broadcast_to(norm, x.shape)
            if shared
            else 0.2 * rng.standard_normal(x.shape).astype(np.float32)
        )
        return (new * 4).round() / 4 if rounded else new

    save_hf(Model(made, jax.tree.map_with_path(moved, params), name="tiny"), folder)
    # With all that was given, such as windows that nothing uses.
    architectures = json.loads((folder / "config.json").read_text())["architectures"]
    (folder / "config.json").write_text(json.dumps({"architectures": architectures} | config))
    return folder


def write_gguf(
    path: Path,
    arch: str,
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    kind: str = "F32",
    split_latents: bool = False,
    extra: dict[str, np.ndarray] | None = None,
    **keys: Any,
) -> Path:
    """Write a GGUF file of a checkpoint's weights. kind: of matrices; keys: more metadata, `__` for a dot.

    split_latents: whether `kv_b_proj` is stored as two tensors, as newer conversions do. extra: tensors by
    their names in GGUF, which replace others.
    """
    writer = gguf.GGUFWriter(path, arch)
    say_config(writer, arch, config)
    for key, value in keys.items():
        add(writer, key.replace("__", "."), value)
    tensors = converted(arch, config, weights, split_latents)
    tensors |= {name: (value, False) for name, value in (extra or {}).items()}
    for name, (value, quantised) in tensors.items():
        wanted = gguf.GGMLQuantizationType[kind if quantised else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(value), wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_case(
    name: str, folder: Path, kind: str = "F32", seed: int = 0, **options: Any
) -> tuple[Path, Path]:
    """Write (the Hugging Face directory, the GGUF file) of a case."""
    arch, config = CASES[name]
    directory = checkpoint(config, folder / "hub", seed)
    weights = load_file(directory / "model.safetensors")
    return directory, write_gguf(folder / f"{name}.gguf", arch, config, weights, kind, **options)


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a key of the type that conversions give it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


# --- metadata ----------------------------------------------------------------------------------------


def say_config(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_context_length(config.get("max_position_embeddings", 2**20))
    if arch == "mamba2":
        writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
        writer.add_ssm_conv_kernel(config["conv_kernel"])
        writer.add_ssm_inner_size(config["num_heads"] * config["head_dim"])
        writer.add_ssm_state_size(config["state_size"])
        writer.add_ssm_time_step_rank(config["num_heads"])
        writer.add_ssm_group_count(config["n_groups"])
        return
    heads = config["num_attention_heads"]
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    size = config.get("head_dim") or config["hidden_size"] // heads
    if arch != "deepseek2":
        writer.add_key_length(size)
        writer.add_value_length(size)
        writer.add_rope_dimension_count(int(size * config.get("partial_rotary_factor", 1)))
    _say_rope(writer, config)
    if arch in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config["sliding_window"] or 0)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch == "gemma3":
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])
        writer.add_rope_freq_base_swa(config["rope_local_base_freq"])
    if config["model_type"] == "mixtral":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if arch == "qwen3moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if arch == "deepseek2":
        _say_deepseek(writer, config)


def _say_rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    writer.add_rope_freq_base(scaling.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "llama3":
        size = config["head_dim"]
        writer.add_tensor("rope_freqs.weight", llama3_divisors(scaling, config["rope_theta"], size))
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    elif kind == "longrope":
        longest, original = config["max_position_embeddings"], config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(
            float(np.sqrt(1 + np.log(longest / original) / np.log(original)))
        )
        for name in ("short", "long"):
            factors = np.array(scaling[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    elif kind is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if "mscale_all_dim" in scaling:
            writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def llama3_divisors(scaling: dict[str, Any], theta: float, size: int) -> np.ndarray:
    """Compute what Llama 3.1 divides each frequency by, by wavelength."""
    length = scaling["original_max_position_embeddings"]
    low, high, factor = (scaling[n] for n in ("low_freq_factor", "high_freq_factor", "factor"))
    out = []
    for i in range(0, size, 2):
        wavelength = 2 * np.pi * theta ** (i / size)
        if wavelength < length / high:
            out.append(1.0)
        elif wavelength > length / low:
            out.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def _say_deepseek(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    # Attention over latents, as newer files have it, beside the sizes of a head.
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rotated)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["model_type"] == "deepseek_v3":
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


# --- tensors -----------------------------------------------------------------------------------------


def converted(
    arch: str, config: dict[str, Any], weights: dict[str, np.ndarray], split_latents: bool
) -> dict[str, tuple[np.ndarray, bool]]:
    """Name in GGUF -> (numbers, whether they may be quantised)."""
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    out = {}
    for stored, numbers in _stacked(weights).items():
        for name, value in _changed(arch, config, stored, numbers, split_latents).items():
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert found is not None, name
            out[found] = (value, value.ndim > 1 and "norm" not in found and "ssm_conv" not in found)
    return out


def _stacked(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts as one tensor."""
    out, experts = {}, {}
    for name, value in weights.items():
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            number, _, rest = after.partition(".")
            experts.setdefault(f"{before}.experts.{rest}", {})[int(number)] = value
        else:
            out[name] = value
    return out | {name: np.stack([of[i] for i in range(len(of))]) for name, of in experts.items()}


def _changed(
    arch: str, config: dict[str, Any], name: str, value: np.ndarray, split_latents: bool
) -> dict[str, np.ndarray]:
    if arch == "llama" and ".q_proj." in name:
        return {name: _paired(value, config["num_attention_heads"])}
    if arch == "llama" and ".k_proj." in name:
        return {name: _paired(value, config.get("num_key_value_heads") or config["num_attention_heads"])}
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return {name: value + 1}
    if name.endswith("e_score_correction_bias"):
        return {name.replace("e_score_correction_bias", "e_score_correction.bias"): value}
    if name.endswith(".dt_bias"):
        return {name.replace(".dt_bias", ".dt_proj.bias"): value}
    if name.endswith(".A_log"):
        return {name: -np.exp(value)[:, None]}
    if name.endswith(".D"):
        return {name: value[:, None]}
    if name.endswith(".conv1d.weight"):
        return {name: value[:, 0]}
    if name.endswith(".mixer.norm.weight"):
        return {name: value.reshape(config["n_groups"], -1)}
    if split_latents and name.endswith("kv_b_proj.weight"):
        heads = value.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
        keys, values = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
        return {
            name.replace("kv_b_proj", "k_b_proj"): keys.swapaxes(1, 2),
            name.replace("kv_b_proj", "v_b_proj"): values,
        }
    return {name: value}


def _paired(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head whose halves rotate together, as pairs of neighbours."""
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return halves.swapaxes(1, 2).reshape(value.shape)
