"""Config files of Gemma, Llama 4, Nemotron-H and Jamba: other spellings, published sizes, refusals."""

import dataclasses

import numpy as np
import pytest

from kvjax.base.errors import InputError
from kvjax.commands.inspect_model import acts_on, model_rows
from kvjax.models.feed_forward import GatedMLP
from kvjax.models.gated_mlps import SparseMLP
from kvjax.models.hf import load_hf, save_hf
from kvjax.models.hf_config import config_from_hf
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.key_as_value import KeyAsValue
from tests.models import hf_fixtures
from tests.models.hf_cases import CASES


def test_sizes_layer_by_layer_are_those_of_the_published_keys():
    case = CASES["gemma4_experts"]
    layers = {"1": {"head_dim": 16, "num_key_value_heads": 2}}
    spelled = {n: x for n, x in case.items() if n not in ("global_head_dim", "num_global_key_value_heads")}
    assert config_from_hf(spelled | {"per_layer_config": layers | {"2": layers["1"]}}) == config_from_hf(case)
    with pytest.raises(InputError, match="per_layer_config gives layers of one kind different settings"):
        config_from_hf(spelled | {"per_layer_config": layers})


def test_numbers_of_layers_may_begin_with_zeros():
    """So does transformers 5.24 write those of ten layers and more."""
    case = CASES["gemma4_text"] | {"num_hidden_layers": 12, "layer_types": None, "num_kv_shared_layers": 0}
    spelled = {n: x for n, x in case.items() if n != "global_head_dim"}
    sizes = {"05": {"head_dim": 16}, "11": {"head_dim": 16}}
    assert config_from_hf(spelled | {"per_layer_config": sizes}) == config_from_hf(case)


def test_full_layers_have_heads_of_their_own_size_and_store_one_array():
    sizes = dict(model_type="gemma4_text", hidden_size=5376, intermediate_size=21504, num_hidden_layers=60)
    sizes |= dict(num_attention_heads=32, num_key_value_heads=16, num_global_key_value_heads=4)
    sizes |= dict(attention_k_eq_v=True, hidden_size_per_layer_input=0, sliding_window=1024)
    config = config_from_hf({"model_type": "gemma4", "text_config": sizes})
    assert config.mixers[5] == KeyAsValue(kv_heads=4, head_dim=512)
    assert config.mixers[4] == Attention(value_norm=True) and config.windows[4:6] == (1024, None)
    assert config.layer_rope(5).rotary_dim == 128 and config.layer_rope(5).kind == "proportional"
    rows = dict(model_rows(config, None, "bfloat16"))
    # 10 of 60 layers, 4 heads of 512 channels, 2 bytes.
    assert rows["KV per token"].startswith("40.0 KiB in bfloat16: 10 layers x 4 heads x 512 channels (in one")
    assert rows["windows"] == "50 layers of the newest 1024 tokens only, 16.0 KiB each"
    assert "a share of what 10 of 60 layers keep" in acts_on(config)


def test_gemma_3n_has_the_published_sizes_and_shares_the_slots_of_two_layers():
    sizes = dict(model_type="gemma3n_text", hidden_size=2048, intermediate_size=[8192] * 30)
    sizes |= dict(
        num_hidden_layers=30, num_kv_shared_layers=10, activation_sparsity_pattern=[0.95] * 10 + [0.0] * 20
    )
    config = config_from_hf({"model_type": "gemma3n", "text_config": sizes})
    assert config.d_ff == 8192 and config.streams == 4 and config.laurel == 64
    assert config.mlps[9:11] == (SparseMLP(sparsity=0.95), GatedMLP())
    assert config.windows[3:6] == (512, None, 512)
    assert [m.takes["slots"].layer for m in config.mixers[20:25]] == [18, 18, 18, 18, 19]
    assert config.rope.theta == 1e6 and config.layer_rope(0).theta == 1e4
    # 4 full layers of 2 heads with 256 channels keep keys and values of all tokens.
    rows = dict(model_rows(config, None, "bfloat16"))
    assert rows["KV per token"].startswith("8.0 KiB in bfloat16: 2 x 4 layers x 2 heads x 256 channels")


@pytest.mark.rotating
def test_a_token_without_a_per_layer_embedding_has_that_of_token_0(tmp_path):
    """As in `Gemma3nModel.get_per_layer_inputs`; the tokenizer's last ids stand for images and sounds."""
    fixture = hf_fixtures.read("gemma3n_text")
    name = "model.embed_tokens_per_layer.weight"
    table = fixture.weights[name].copy()
    few = fixture._replace(
        config=fixture.config | {"vocab_size_per_layer_input": 70},
        weights=fixture.weights | {name: table[:70].copy()},
    )
    table[70:] = table[0]
    same = fixture._replace(weights=fixture.weights | {name: table})
    found, expected = (
        load_hf(hf_fixtures.write(one, tmp_path / str(i)))(fixture.tokens)
        for i, one in enumerate((few, same))
    )
    assert (fixture.tokens >= 70).any()
    np.testing.assert_array_equal(found, expected)
    save_hf(load_hf(tmp_path / "0"), tmp_path / "again")
    np.testing.assert_array_equal(load_hf(tmp_path / "again")(fixture.tokens), found)


def test_layers_side_by_side_share_the_norm_of_the_checkpoint(tmp_path):
    model = load_hf(hf_fixtures.write(hf_fixtures.read("falcon_h1"), tmp_path))
    assert model.config.layers == 6 and model.config.inputs == (None, 0, None, 2, None, 4)
    first, second, *rest = model.params["layers"]
    np.testing.assert_array_equal(first["attn_norm"], second["attn_norm"])
    apart = first | {"attn_norm": first["attn_norm"] + 1}
    apart = dataclasses.replace(model, params=model.params | {"layers": (apart, second, *rest)})
    with pytest.raises(InputError, match="layers.0.input_layernorm.weight is one tensor in a checkpoint"):
        save_hf(apart, tmp_path / "again")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias, attention_bias, mlp_bias = true"),
        ("falcon_h1", {"mamba_d_head": 6}, "mamba_d_head = 6 times 6 heads is not mamba_d_ssm = 30"),
        ("falcon_h1", {"time_step_limit": [0.1, 1.0]}, "expected 0 and infinity"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, "2 multipliers were given, expected 5"),
        ("gemma3n_text", {"altup_correct_scale": False}, "altup_correct_scale = false is not supported"),
        ("gemma3n_text", {"num_kv_shared_layers": 5}, "leave layers without keys"),
        ("gemma3n_text", {"intermediate_size": [28, 28]}, "one for each of 5 layers"),
        ("gemma3n_text", {"activation_sparsity_pattern": [0.5]}, "a share for each of 5 layers"),
        ("gemma3n_text", {"activation_sparsity_pattern": 1.5}, "sparsity must be above 0 and below 1"),
        ("gemma3n_text", {"vocab_size_per_layer_input": 81}, "expected at most the vocab_size of 80"),
        ("gemma4_text", {"attention_k_eq_v": True}, "attention_k_eq_v beside num_kv_shared_layers"),
        ("gemma4_text", {"vocab_size_per_layer_input": 79}, "vocab_size_per_layer_input is 79, expected"),
        ("gemma4_text", {"num_kv_shared_layers": 5}, "leave layers without keys"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ("llama4_text", {"no_rope_layers": [1, 0]}, "must say of each of 4 layers whether it turns"),
        ("nemotron_h", {"hybrid_override_pattern": "M*X"}, "layers_block_type names X, expected"),
        (
            "glm_moe_dsa",
            {"indexer_types": ["full", "none", "full"]},
            "must name full or shared for each",
        ),
        ("nemotron_h", {"n_group": 2}, "n_group other than 1 is not supported"),
        ("jamba", {"mamba_proj_bias": True}, "mamba_proj_bias = true"),
        ("bamba", {"mamba_conv_bias": False}, "mamba_conv_bias = false is not supported for bamba"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias = true is not supported for ernie4_5_moe"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name, changes, message):
    with pytest.raises(InputError, match=message):
        config_from_hf(CASES[name] | changes)


def test_index_keys_are_part_of_the_cache_in_layers_with_an_indexer():
    config = config_from_hf(CASES["glm_moe_dsa_picks"])
    assert [m.source_of("picked") for m in config.mixers] == [None, 0, None, 2]
    assert [m.slots_of(config).key for m in config.mixers] == [12 + 4 + 8, 12 + 4] * 2
    with pytest.raises(InputError, match="indexer_types begins with shared"):
        config_from_hf(CASES["glm_moe_dsa_picks"] | {"indexer_types": ["shared", "full", "full", "full"]})
