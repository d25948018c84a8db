"""DeepSeek-V2 and V3 under YaRN as their authors' class computes it, in float64.

transformers 5.2 has the factor on the logits for V3 alone, so this is the only check of V2's.
"""

import json
import math

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax.models.hf import load_hf
from kvjax.models.hf_config import config_from_hf
from kvjax.models.hf_config_out import config_to_hf
from tests.models.hf_fixtures import BAR, relative_error

HEADS, NOPE, TURNED, VALUE, RANK, WIDTH, VOCAB, TOKENS = 3, 6, 8, 7, 12, 20, 40, 40
FACTOR, ORIGINAL, THETA, EPS = 8.0, 16, 10000.0, 1e-6
BOTH = {"mscale": 0.707, "mscale_all_dim": 0.707}  # of the published DeepSeek-V2
APART = {"mscale": 1.0, "mscale_all_dim": 0.6}


def settings(model_type, scales):
    return {
        "model_type": model_type, "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 24,
        "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "rms_norm_eps": EPS, "rope_theta": THETA, "max_position_embeddings": 128, "kv_lora_rank": RANK,
        "q_lora_rank": None, "qk_rope_head_dim": TURNED, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 4,
        "first_k_dense_replace": 1, "tie_word_embeddings": False,
        "rope_scaling": {
            "type": "yarn", "factor": FACTOR, "original_max_position_embeddings": ORIGINAL,
            "beta_fast": 32, "beta_slow": 1, **scales,
        },
    }  # fmt: skip


def checkpoint(config, folder):
    shapes = {
        "model.embed_tokens.weight": (VOCAB, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (VOCAB, WIDTH),
        "model.layers.0.input_layernorm.weight": (WIDTH,),
        "model.layers.0.post_attention_layernorm.weight": (WIDTH,),
        "model.layers.0.self_attn.q_proj.weight": (HEADS * (NOPE + TURNED), WIDTH),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (RANK + TURNED, WIDTH),
        "model.layers.0.self_attn.kv_a_layernorm.weight": (RANK,),
        "model.layers.0.self_attn.kv_b_proj.weight": (HEADS * (NOPE + VALUE), RANK),
        "model.layers.0.self_attn.o_proj.weight": (WIDTH, HEADS * VALUE),
        "model.layers.0.mlp.gate_proj.weight": (24, WIDTH),
        "model.layers.0.mlp.up_proj.weight": (24, WIDTH),
        "model.layers.0.mlp.down_proj.weight": (WIDTH, 24),
    }
    rng, weights = np.random.default_rng(3), {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape)
        value = 1 + 0.3 * noise if "norm" in name else 1.5 * noise * shape[-1] ** -0.5
        weights[name] = value.astype(np.float32)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return weights


def magnitude(scale):
    """0.1 m ln(factor) + 1 (YaRN, arXiv:2309.00071, eq. 22, with the weight m of DeepSeek's config)."""
    return 0.1 * scale * math.log(FACTOR) + 1


def angles():
    """[T, TURNED / 2]: frequencies that turn beta_fast times within the original context stay."""

    def turns_at(count):
        return TURNED * math.log(ORIGINAL / (count * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = max(math.floor(turns_at(32)), 0), min(math.ceil(turns_at(1)), TURNED - 1)
    share = np.clip((np.arange(TURNED // 2) - low) / (high - low), 0, 1)
    base = THETA ** (-np.arange(0, TURNED, 2) / TURNED)
    return np.arange(TOKENS)[:, None] * (base / FACTOR * share + base * (1 - share))


def turn(x, amplitude):
    """Channels 2 i and 2 i + 1 of [T, ..., TURNED] turned together."""
    angle = angles().reshape(TOKENS, *[1] * (x.ndim - 2), -1)
    y = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angle) * amplitude
    return np.stack([y.real, y.imag], -1).reshape(x.shape)


def rms(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def reference(weights, tokens, scales, squared):
    """Logits [T, V]; squared: what the softmax's logits multiply by beside the usual scale."""
    w = {n.removeprefix("model.layers.0."): x.astype(np.float64) for n, x in weights.items()}
    amplitude = magnitude(scales["mscale"]) / magnitude(scales["mscale_all_dim"])
    x = w["model.embed_tokens.weight"][tokens]
    y = rms(x, w["input_layernorm.weight"])
    q = (y @ w["self_attn.q_proj.weight"].T).reshape(TOKENS, HEADS, NOPE + TURNED)
    q = np.concatenate([q[..., :NOPE], turn(q[..., NOPE:], amplitude)], -1)
    down = y @ w["self_attn.kv_a_proj_with_mqa.weight"].T
    latent = rms(down[:, :RANK], w["self_attn.kv_a_layernorm.weight"])
    up = (latent @ w["self_attn.kv_b_proj.weight"].T).reshape(TOKENS, HEADS, NOPE + VALUE)
    shared = turn(down[:, RANK:], amplitude)[:, None]
    k = np.concatenate([up[..., :NOPE], np.broadcast_to(shared, (TOKENS, HEADS, TURNED))], -1)
    logits = np.einsum("thd,shd->hts", q, k) * (NOPE + TURNED) ** -0.5 * squared
    logits = np.where(np.tri(TOKENS, dtype=bool), logits, -np.inf)
    share = np.exp(logits - logits.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    out = np.einsum("hts,shd->thd", share, up[..., NOPE:]).reshape(TOKENS, -1)
    x = x + out @ w["self_attn.o_proj.weight"].T
    y = rms(x, w["post_attention_layernorm.weight"])
    gate, up, down = (w[f"mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
    a = y @ gate.T
    x = x + (a / (1 + np.exp(-a)) * (y @ up.T)) @ down.T
    return rms(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


@pytest.mark.parametrize("scales", [BOTH, APART])
@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_logits_multiply_by_the_square_of_yarns_factor(model_type, scales, tmp_path):
    weights = checkpoint(settings(model_type, scales), tmp_path)
    tokens = np.random.default_rng(0).integers(0, VOCAB, TOKENS)
    found = load_hf(tmp_path)(tokens[None])[0]
    expected = reference(weights, tokens, scales, magnitude(scales["mscale_all_dim"]) ** 2)
    assert relative_error(found, expected) <= BAR
    assert relative_error(found, reference(weights, tokens, scales, 1.0)) > 100 * BAR


def test_the_factor_survives_the_way_to_json_and_back():
    config = config_from_hf(settings("deepseek_v2", BOTH) | {"first_k_dense_replace": 0})
    assert config.mixers[0].scale == pytest.approx((NOPE + TURNED) ** -0.5 * magnitude(0.707) ** 2)
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config
