"""Kimi Linear directories: what is loaded computes what the paper and the authors' class say.

The reference runs in float64, one token at a time, from the tensors as they lie in the file: KDA by the
equations of arXiv:2510.26692, latent attention by those of arXiv:2405.04434 without rotation, experts by
those of DeepSeek-V3 (arXiv:2412.19437).
"""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.base.errors import InputError
from kvjax.models.feed_forward import MoE
from kvjax.models.hf import load_hf, save_hf
from kvjax.models.hf_config import config_from_hf
from kvjax.models.hf_config_out import config_to_hf
from kvjax.models.params import plan
from tests.models.hf_fixtures import BAR, relative_error
from tests.sweep import sweep

PROMPT, GREEDY = 24, 32

# In the words of the published config.json.
PUBLISHED = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "vocab_size": 60,
    "hidden_size": 20,
    "head_dim": 4,
    "intermediate_size": 28,
    "num_hidden_layers": 5,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-4,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "model_max_length": 512,
    "kv_lora_rank": 12,
    "q_lora_rank": None,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "mla_use_nope": True,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 12,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3, 5],
        "full_attn_layers": [4],
        "num_heads": 3,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
    },
}
CASES = {
    "published": PUBLISHED,
    "grouped": PUBLISHED
    | {
        "num_hidden_layers": 4, "tie_word_embeddings": True, "num_shared_experts": 2, "num_expert_group": 3,
        "topk_group": 2, "moe_renormalize": False, "first_k_dense_replace": 2, "moe_layer_freq": 2,
        # So large that it shows which norms do not use it.
        "rms_norm_eps": 0.01,
        "linear_attn_config": PUBLISHED["linear_attn_config"]
        | {"kda_layers": [2, 3], "full_attn_layers": [1, 4], "short_conv_kernel_size": 3},
    },
}  # fmt: skip


# --- the reference -----------------------------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def gated_mlp(p, names, x):
    gate, up, down = (p[f"{name}.weight"] for name in names)
    return down @ (silu(gate @ x) * (up @ x))


def delta_attention(p, x, config, past):
    """S = (I - beta k k') Diag(e^g) S + beta k v', o = S' q / sqrt(K), normalised and gated per head."""
    linear = config["linear_attn_config"]
    heads, width, taps = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
    mixed = []
    for name in "qkv":
        seen = past.setdefault(name, [np.zeros(heads * width)] * taps)
        seen.append(p[f"{name}_proj.weight"] @ x)
        kernel = p[f"{name}_conv1d.weight"][:, 0]
        y = sum(kernel[:, taps - 1 - back] * seen[-1 - back] for back in range(taps))
        mixed.append(silu(y).reshape(heads, width))
    q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in mixed[:2])
    low = p["f_b_proj.weight"] @ (p["f_a_proj.weight"] @ x) + p["dt_bias"]
    decay = np.exp(-np.exp(p["A_log"].reshape(heads, 1)) * np.log1p(np.exp(low.reshape(heads, width))))
    beta = sigmoid(p["b_proj.weight"] @ x)
    gate = (p["g_b_proj.weight"] @ (p["g_a_proj.weight"] @ x)).reshape(heads, width)
    states = past.setdefault("S", np.zeros((heads, width, width)))
    out = np.empty((heads, width))
    for h in range(heads):
        erase = np.eye(width) - beta[h] * np.outer(k[h], k[h])
        states[h] = erase @ (decay[h][:, None] * states[h]) + beta[h] * np.outer(k[h], mixed[2][h])
        out[h] = states[h].T @ q[h] / np.sqrt(width)
    y = rms(out, p["o_norm.weight"], config["rms_norm_eps"]) * sigmoid(gate)
    return p["o_proj.weight"] @ y.ravel()


def latent_attention(p, x, config, past):
    """Every head's keys and values from the latent; the shared part of the keys does not turn."""
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    nope, rest = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    down = p["kv_a_proj_with_mqa.weight"] @ x
    up = p["kv_b_proj.weight"] @ rms(down[:rank], p["kv_a_layernorm.weight"], 1e-6)
    up = up.reshape(heads, nope + config["v_head_dim"])
    key = np.concatenate([up[:, :nope], np.broadcast_to(down[rank:], (heads, rest))], 1)
    past.setdefault("k", []).append(key)
    past.setdefault("v", []).append(up[:, nope:])
    q = (p["q_proj.weight"] @ x).reshape(heads, nope + rest)
    logits = np.einsum("hd,shd->hs", q, np.array(past["k"])) / np.sqrt(nope + rest)
    share = np.exp(logits - logits.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    return p["o_proj.weight"] @ np.einsum("hs,shd->hd", share, np.array(past["v"])).ravel()


def experts(p, x, config):
    count, groups, top = config["num_experts"], config["num_expert_group"], config["num_experts_per_token"]
    score = sigmoid(p["gate.weight"] @ x)
    choice = (score + p["gate.e_score_correction_bias"]).reshape(groups, count // groups)
    best = np.argsort(np.sort(choice, -1)[:, -2:].sum(-1))[-config["topk_group"] :]
    choice = np.where(np.isin(np.arange(groups), best)[:, None], choice, 0.0).ravel()
    chosen = np.argsort(choice)[-top:]
    weight = score[chosen]
    if config["moe_renormalize"]:
        weight = weight / weight.sum()
    out = gated_mlp(p, [f"shared_experts.{n}_proj" for n in ("gate", "up", "down")], x)
    for e, w in zip(chosen, weight * config["routed_scaling_factor"], strict=True):
        out = out + w * gated_mlp(p, [f"experts.{e}.{n}" for n in ("w1", "w3", "w2")], x)
    return out


def below(weights, prefix):
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


class Reference:
    """A checkpoint in float64, asked one token after the other."""

    def __init__(self, config, weights):
        self.config, self.weights = config, {n: w.astype(np.float64) for n, w in weights.items()}
        self.layers = [below(self.weights, f"model.layers.{i}.") for i in range(config["num_hidden_layers"])]
        self.past = [{} for _ in self.layers]

    def __call__(self, token):
        config, eps = self.config, self.config["rms_norm_eps"]
        embed = self.weights["model.embed_tokens.weight"]
        x = embed[token]
        for i, (p, past) in enumerate(zip(self.layers, self.past, strict=True)):
            delta = i + 1 in config["linear_attn_config"]["kda_layers"]
            mix = delta_attention if delta else latent_attention
            x = x + mix(below(p, "self_attn."), rms(x, p["input_layernorm.weight"], eps), config, past)
            y = rms(x, p["post_attention_layernorm.weight"], eps)
            if i >= config["first_k_dense_replace"] and i % config["moe_layer_freq"] == 0:
                x = x + experts(below(p, "block_sparse_moe."), y, config)
            else:
                x = x + gated_mlp(p, [f"mlp.{n}_proj" for n in ("gate", "up", "down")], y)
        unembed = embed if config["tie_word_embeddings"] else self.weights["lm_head.weight"]
        return unembed @ rms(x, self.weights["model.norm.weight"], eps)


# --- checkpoints -------------------------------------------------------------------------------------


def tensor_shapes(config):
    """Every tensor of a checkpoint, as the authors' class declares it."""
    d, linear = config["hidden_size"], config["linear_attn_config"]
    width, heads, taps = linear["head_dim"], linear["num_heads"], linear["short_conv_kernel_size"]
    inner, n, rank = width * heads, config["num_attention_heads"], config["kv_lora_rank"]
    nope, rest, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    delta = {f"{x}_proj.weight": (inner, d) for x in "qkv"}
    delta |= {f"{x}_conv1d.weight": (inner, 1, taps) for x in "qkv"}
    delta |= {f"{x}_a_proj.weight": (width, d) for x in "fg"}
    delta |= {f"{x}_b_proj.weight": (inner, width) for x in "fg"}
    delta |= {"A_log": (1, 1, heads, 1), "dt_bias": (inner,), "b_proj.weight": (heads, d)}
    delta |= {"o_norm.weight": (width,), "o_proj.weight": (d, inner)}
    latent = {
        "q_proj.weight": (n * (nope + rest), d),
        "kv_a_proj_with_mqa.weight": (rank + rest, d),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (n * (nope + value), rank),
        "o_proj.weight": (d, n * value),
    }

    def mlp(inner, names=("gate_proj", "up_proj", "down_proj")):
        shapes = [(inner, d), (inner, d), (d, inner)]
        return {f"{name}.weight": shape for name, shape in zip(names, shapes, strict=True)}

    out = {"model.embed_tokens.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (config["vocab_size"], d)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        out |= {f"{at}{n}_layernorm.weight": (d,) for n in ("input", "post_attention")}
        mixer = delta if i + 1 in linear["kda_layers"] else latent
        out |= {f"{at}self_attn.{n}": s for n, s in mixer.items()}
        if i < config["first_k_dense_replace"] or i % config["moe_layer_freq"]:
            out |= {f"{at}mlp.{n}": s for n, s in mlp(config["intermediate_size"]).items()}
            continue
        at += "block_sparse_moe."
        count, small = config["num_experts"], config["moe_intermediate_size"]
        out |= {f"{at}gate.weight": (count, d), f"{at}gate.e_score_correction_bias": (count,)}
        shared = mlp(small * config["num_shared_experts"])
        out |= {f"{at}shared_experts.{n}": s for n, s in shared.items()}
        for e in range(count):
            out |= {f"{at}experts.{e}.{n}": s for n, s in mlp(small, ("w1", "w3", "w2")).items()}
    return out


def checkpoint(config, folder):
    """(random weights that bfloat16 holds exactly, the directory they were written to)."""
    rng = np.random.default_rng(0)
    weights = {}
    for tensor, shape in tensor_shapes(config).items():
        noise = rng.standard_normal(shape)
        if len(shape) == 2:
            value = noise * (1.0 if "embed" in tensor else 1.5) * shape[-1] ** -0.5
        else:
            value = (0.5 if "conv" in tensor else 0.3) * noise + (1.0 if "norm" in tensor else 0.0)
        weights[tensor] = value.astype(ml_dtypes.bfloat16).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return weights, folder


# --- parity ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sweep(CASES, "grouped"))
@pytest.mark.rotating
def test_logits_and_greedy_tokens_are_those_of_the_reference(name, tmp_path):
    weights, folder = checkpoint(CASES[name], tmp_path)
    reference = Reference(CASES[name], weights)
    tokens = np.random.default_rng(1).integers(0, CASES[name]["vocab_size"], PROMPT).tolist()
    expected = [reference(t) for t in tokens]
    for _ in range(GREEDY):
        tokens.append(int(expected[-1].argmax()))
        expected.append(reference(tokens[-1]))
    expected, tokens = np.array(expected)[None], np.array([tokens], np.int32)

    model = load_hf(folder)
    found = np.asarray(model(tokens))
    assert relative_error(found, expected) <= BAR
    top = np.sort(expected[0, PROMPT - 1 : -1], -1)
    clear = top[:, -1] - top[:, -2] > 10 * np.abs(found - expected).max()
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(found[0, PROMPT - 1 : -1].argmax(-1)[clear], tokens[0, PROMPT:][clear])

    logits, cache = kvjax.prefill(model, tokens[:, :PROMPT], room=GREEDY)
    for t in range(PROMPT, PROMPT + GREEDY):
        assert relative_error(logits, expected[:, t - 1]) <= BAR
        logits, cache = kvjax.step(model, cache, tokens[:, t])


@pytest.mark.rotating
def test_bfloat16_logits_stay_near_the_reference(tmp_path):
    # In the other case, rounding changes which experts a token visits.
    weights, folder = checkpoint(CASES["grouped"], tmp_path)
    reference = Reference(CASES["grouped"], weights)
    tokens = np.arange(8)
    expected = np.array([[reference(t) for t in tokens]])
    assert relative_error(load_hf(folder, dtype=jnp.bfloat16)(tokens[None]), expected) < 0.1


# --- there and back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_saved_tensors_and_config_are_those_that_were_loaded(name, tmp_path):
    weights, folder = checkpoint(CASES[name], tmp_path / "theirs")
    model = load_hf(folder)
    save_hf(model, tmp_path / "ours")
    saved = load_file(tmp_path / "ours" / "model.safetensors")
    assert saved.keys() == weights.keys()
    for tensor, value in weights.items():
        np.testing.assert_array_equal(saved[tensor], value, strict=True)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    absent = ("rope_theta", "rope_scaling", "num_nextn_predict_layers")
    assert {n: written[n] for n in CASES[name] if n not in absent} == {
        n: x for n, x in CASES[name].items() if n not in absent
    }
    again = load_hf(tmp_path / "ours")
    assert again.config == model.config
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), again.params, model.params)


@pytest.mark.parametrize("parts", [2, 4])
def test_a_device_reads_its_piece_of_what_lies_in_several_tensors(parts, tmp_path):
    weights, folder = checkpoint(PUBLISHED, tmp_path)
    mesh = Mesh(np.array(jax.devices()[:parts]), ("model",))

    def sharding(path, shape):
        return NamedSharding(mesh, P(None, None, "model") if path.endswith("conv") else P())

    groups = plan(load_hf(folder).config, stacked=True)
    params = load_hf(folder, sharding=sharding, groups=groups).params
    names = [f"model.layers.0.self_attn.{x}_conv1d.weight" for x in "qkv"]
    conv = params["layers"][0]["conv"]
    assert {s.data.shape for s in conv.addressable_shards} == {(1, 4, 72 // parts)}
    np.testing.assert_array_equal(conv[0], np.concatenate([weights[n][:, 0] for n in names]).T)


@pytest.mark.parametrize(("first", "every"), [(0, 1), (1, 1), (1, 2), (3, 2), (3, 4), (4, 1), (5, 1), (0, 5)])
def test_which_layers_have_experts_survives_the_way_back(first, every):
    config = config_from_hf(PUBLISHED | {"first_k_dense_replace": first, "moe_layer_freq": every})
    sparse = [isinstance(word, MoE) for word in config.mlps]
    assert sparse == [i >= first and i % every == 0 for i in range(5)]
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


def test_a_model_without_experts_is_dense_throughout():
    config = config_from_hf({k: v for k, v in PUBLISHED.items() if "expert" not in k and "moe" not in k})
    assert not any(isinstance(word, MoE) for word in config.mlps)
    assert config_from_hf(config_to_hf(config)) == config


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"mla_use_nope": False}, "mla_use_nope = False is not supported"),
        ({"q_lora_rank": 8}, "q_lora_rank = 8 is not supported"),
        ({"moe_router_activation_func": "softmax"}, "'softmax' is not supported"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate = True"),
        ({"hidden_act": "situ"}, "hidden_act 'situ'"),
        ({"num_hidden_layers": 6}, "must name each of the layers 1 to 6 once"),
        ({"kv_lora_rank": None}, "lacks kv_lora_rank"),
        ({"linear_attn_config": None}, "lacks linear_attn_config"),
        (
            {"linear_attn_config": PUBLISHED["linear_attn_config"] | {"gate_lower_bound": -5.0}},
            "gate_lower_bound = -5.0",
        ),
    ],
)
def test_what_is_not_built_is_refused(change, why):
    with pytest.raises(InputError, match=why):
        config_from_hf(PUBLISHED | change)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    weights, folder = checkpoint(PUBLISHED, tmp_path)
    conv = weights.pop("model.layers.1.self_attn.k_conv1d.weight")
    weights["model.layers.1.self_attn.g_b_proj.bias"] = np.zeros(24, np.float32)
    weights["model.layers.2.self_attn.A_log"] = np.zeros(3, np.float32)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(InputError) as error:
        load_hf(folder)
    for part in ("1 missing: model.layers.1.self_attn.k_conv1d.weight", "g_b_proj.bias", "[1, 1, 3, 1]"):
        assert part in str(error.value)
    assert conv.shape == (24, 1, 4)


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path):
    weights, folder = checkpoint(CASES["grouped"], tmp_path)
    plain = load_hf(folder)
    save_file(weights | {"model.layers.4.eh_proj.weight": np.ones(3)}, folder / "model.safetensors")
    with pytest.warns(UserWarning, match="1 tensors predict further tokens"):
        jax.tree.map(np.testing.assert_array_equal, load_hf(folder).params, plain.params)
