"""Everything that can be wrong with a model directory gets one clear error before any weight is read."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax.base.errors import InputError
from kvjax.commands.inspect_model import find_config
from kvjax.io.checkpoint import load_checkpoint, save_checkpoint
from kvjax.io.load import load
from kvjax.models.hf import load_hf, save_hf
from tests.models import hf_fixtures


@pytest.fixture
def fixture():
    return hf_fixtures.read("llama")


@pytest.fixture
def folder(fixture, tmp_path):
    """Write a good Llama directory, to be spoiled."""
    return hf_fixtures.write(fixture, tmp_path / "model")


def edit_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


# --- paths -------------------------------------------------------------------------------------------


def test_missing_path(tmp_path):
    with pytest.raises(InputError, match="nowhere does not exist, expected a model directory"):
        load(tmp_path / "nowhere")


def test_missing_name_suggests_a_shipped_one():
    with pytest.raises(InputError, match="did you mean the shipped model recall-tiny"):
        load("recall-tinny")


def test_a_file_points_to_its_directory(folder):
    with pytest.raises(InputError, match=r"is a file, expected a model directory: pass .*model instead"):
        load(folder / "model.safetensors")


def test_unreadable_directory(folder, monkeypatch):
    def deny(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", deny)  # permissions themselves do not stop root
    with pytest.raises(
        InputError, match=r"model cannot be read \(Permission denied\): check its permissions"
    ):
        load(folder)


def test_an_unreadable_file_is_an_input_error(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder / "gone.json")
    with pytest.raises(InputError, match=r"config\.json"):
        load(folder)


def test_dangling_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match="link does not exist"):
        load(tmp_path / "link")


def test_not_a_model_directory(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(
        InputError, match=r"not a model directory: it has no config\.json \(it has notes\.txt\)"
    ):
        load(tmp_path)


def test_no_network(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_, **__):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(InputError, match="no network.*hf download meta-llama/Llama-3.2-1B --local-dir DIR"):
        load("meta-llama/Llama-3.2-1B")


# --- config.json -------------------------------------------------------------------------------------


def test_unsupported_model_type_lists_the_supported(folder):
    edit_config(folder, model_type="qwen2_moe")
    with pytest.raises(
        InputError,
        match="'qwen2_moe' is not supported .*qwen3_moe.*llama, mistral, .*qwen3_next.*, mistral3, gemma3",
    ):
        load(folder)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("deepseek_v4", "is DeepSeek-V4 and left out: its layers cache entries that pool 4 or 128 tokens"),
        ("minimax_m3_vl", "is MiniMax-M3 and left out: each KV head picks blocks of 128 tokens"),
        (
            "mistral_large4",
            "is Mistral Large 4 and left out: layers with an indexer read the latents of",
        ),
        ("qwen2_moe", r"is not supported .the nearest is qwen3_moe."),
    ],
)
def test_a_family_that_does_not_load_is_named_with_the_reason_and_how_to_add_one(name, said, folder, capsys):
    edit_config(folder, model_type=name)
    for command in (lambda: load(folder), lambda: find_config(str(folder))):
        with pytest.raises(InputError, match=f"model_type '{name}' {said}.*own-architecture.md"):
            command()


@pytest.mark.parametrize(("model_type", "loads"), [("llama", True), ("my_llama", False)])
def test_code_beside_a_checkpoint_never_runs(model_type, loads, folder, tmp_path):
    ran = tmp_path / "ran"
    (folder / "modeling_mine.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Mine: pass\n")
    names = {"AutoConfig": "modeling_mine.Mine", "AutoModelForCausalLM": "modeling_mine.Mine"}
    edit_config(folder, model_type=model_type, auto_map=names, trust_remote_code=True)
    edit_tokenizer = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["modeling_mine.Mine", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(edit_tokenizer))
    if loads:
        load(folder)
    else:
        with pytest.raises(InputError, match="'my_llama' is not supported"):
            load(folder)
    assert not ran.exists() and not any(name.endswith("modeling_mine") for name in sys.modules)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "hidden_size = None, expected a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_key_value_heads": 4}, "6 query heads cannot share 4 KV heads"),
        ({"head_dim": 7}, "head_dim is 7, expected an even whole number >= 2"),
        ({"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not supported, expected one of silu"),
        (
            {"rope_scaling": {"type": "ntk", "factor": 4.0}},
            "'ntk' is not supported, expected one of def",
        ),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "lacks short_factor, long_factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            r"gives short_factor = \[1.0\], expected 4 numbers: one for each pair of the 8 channels",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "'llama3' in config.json lacks low_freq_factor",
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, r"quantised \(hqq\), expected one of fp8, .*gptq"),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention"], "use_sliding_window": True},
            "1 entries for 3",
        ),
        ({"model_type": "gemma2", "layer_types": ["chunked"] * 3}, "layer_types names chunked"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "causal decoders only"),
        ({"num_hidden_layers": 10**12}, r"num_hidden_layers = 10{12}, the tensors beside it name 3 layers"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers = '3', expected a positive whole number"),
        ({"rope_theta": 0}, "rope_theta = 0, expected a number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "theta and factor above 0, got .* and 0.0"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "no model that can be built: .*'two'"),
        ({"rope_scaling": "linear"}, "no model that can be built"),
        ({"rms_norm_eps": -1e-6}, "norm_eps is -1e-06, expected a number >= 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps = 'small', expected a number"),
        ({"max_position_embeddings": "2048"}, "max_position_embeddings = '2048', expected a number"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor = 'half', expected a number"),
        ({"quantization_config": "gptq"}, "quantised"),
        (
            {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "partial_rotary_factor = 0.5 with rotary scaling 'linear', which the class of llama",
        ),
    ],
)
def test_settings_that_cannot_be_built(fields, message, folder):
    if fields.get("model_type"):
        edit_config(folder, sliding_window=4)
    edit_config(folder, **fields)
    with pytest.raises(InputError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", '{"model_type": "lla'),
        ("config.json", "[1, 2]"),
        ("tokenizer_config.json", "{,}"),
        ("generation_config.json", ""),
        ("tokenizer.json", '{"model": 3}'),
    ],
)
def test_broken_json_names_the_file(file, text, folder):
    (folder / file).write_text(text)
    with pytest.raises(InputError, match=file.replace(".", r"\.")):
        load(folder)


# --- tensors -----------------------------------------------------------------------------------------


def test_missing_extra_and_wrongly_shaped_tensors_are_named_together(fixture, tmp_path):
    weights = dict(fixture.weights)
    del weights["model.layers.1.mlp.up_proj.weight"], weights["lm_head.weight"]
    weights["model.layers.3.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
    weights["model.norm.weight"] = np.zeros(7, np.float32)
    with pytest.raises(InputError) as error:
        load(hf_fixtures.write(fixture._replace(weights=weights), tmp_path))
    message = str(error.value)
    assert "2 missing: lm_head.weight, model.layers.1.mlp.up_proj.weight;" in message
    assert "1 not expected: model.layers.3.mlp.up_proj.weight;" in message
    assert "1 of another shape: model.norm.weight (expected [24], found [7])" in message


@pytest.mark.parametrize(
    ("config", "weights", "message"),
    [
        ("qwen3", "llama", "model_type qwen3.*missing: .*self_attn.k_norm.weight.*of another shape: model"),
        ("llama", "gemma2", "model_type llama.*not expected: model.layers.0.post_feedforward_layernorm"),
        ("deepseek_v3", "mixtral", "model_type deepseek_v3.*kv_a_proj.* not expected: .*block_sparse_moe"),
        ("mamba2", "llama", "model_type mamba2.*missing: backbone.*not expected: .*layers.0.input_layern"),
    ],
)
def test_a_config_of_one_family_with_the_tensors_of_another_names_both(config, weights, message, tmp_path):
    mixed = hf_fixtures.read(weights)._replace(config=hf_fixtures.read(config).config)
    with pytest.raises(InputError, match=message):
        load(hf_fixtures.write(mixed, tmp_path))


def test_a_fused_tensor_is_checked_as_a_whole(tmp_path):
    fixture = hf_fixtures.read("phi3")
    config = fixture.config | {"num_key_value_heads": 3}
    with pytest.raises(InputError, match=r"qkv_proj.weight \(expected \[72, 24\], found \[40, 24\]\)"):
        load(hf_fixtures.write(fixture._replace(config=config), tmp_path))


def test_a_long_list_of_names_is_cut(folder):
    edit_config(folder, num_hidden_layers=9)
    with pytest.raises(InputError, match="and 88 more"):
        load(folder)


def test_unknown_dtype(fixture, tmp_path):
    weights = fixture.weights | {"model.norm.weight": np.zeros(20, np.int8)}
    with pytest.raises(InputError, match=r"dtype other than .*BF16: model.norm.weight \(I8\)"):
        load(hf_fixtures.write(fixture._replace(weights=weights), tmp_path))


def test_a_dtype_no_model_runs_in(folder):
    for dtype in ("int8", "float65", jnp.float64):
        with pytest.raises(InputError, match="expected float32, float16, bfloat16"):
            load(folder, dtype=dtype)


# --- weight files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 5, 8, 200, -1, -5000])
def test_truncated_safetensors(keep, folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    with pytest.raises(InputError, match=rf"model\.safetensors is truncated: {len(whole[:keep])} bytes"):
        load(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer.*git lfs pull"),
        (b"<!DOCTYPE html><html>not found</html>", "no safetensors file"),
        (b"\x02\0\0\0\0\0\0\0[]", "no safetensors file"),
    ],
)
def test_what_only_looks_like_safetensors(content, message, folder):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=message):
        load(folder)


def test_a_tensor_whose_bytes_do_not_fit_its_shape(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"shape":[80,24]', b'"shape":[20,24]'))
    with pytest.raises(InputError, match=r"damaged one \(invalid shape"):
        load(folder)


def test_no_safetensors(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="has no safetensors .*pytorch_model.bin.*safe_serialization"):
        load(folder)


def test_a_shard_that_the_index_names_is_missing(fixture, tmp_path):
    folder = hf_fixtures.write(fixture, tmp_path, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match="lacks model-00002-of-00003.safetensors"):
        load(folder)


def test_an_index_without_its_map(fixture, tmp_path):
    folder = hf_fixtures.write(fixture, tmp_path, shards=2)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InputError, match="has no weight_map"):
        load(folder)


NO_NAMES = (
    "../w.safetensors",
    "{tmp}/w.safetensors",
    "a/../../w.safetensors",
    5,
    ["w"],
    {"a": 1},
    None,
    "x" * 5000,
    "",
    "..",
)


@pytest.mark.parametrize("name", NO_NAMES, ids=lambda name: str(name)[:20])
def test_an_index_that_names_a_file_elsewhere(name, fixture, tmp_path):
    folder = hf_fixtures.write(fixture, tmp_path / "model", shards=2)
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder.parent / "w.safetensors")
    first = next(iter(data["weight_map"]))
    data["weight_map"][first] = name.format(tmp=folder.parent) if isinstance(name, str) else name
    index.write_text(json.dumps(data))
    with pytest.raises(
        InputError, match="weight_map in .* expected the plain name of one beside it"
    ) as caught:
        load(folder)
    assert len(str(caught.value)) < 400 + len(str(folder)) and "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [[], {}, [5]])
def test_a_model_type_that_is_no_text(value, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": value}))
    with pytest.raises(InputError, match="gives model_type = .* expected a text"):
        load(folder)


@pytest.mark.rotating
@pytest.mark.parametrize("value", [None, "x", 5, [], [5]])
def test_a_checkpoint_whose_config_is_no_object(value, checkpoint):
    head = json.loads((checkpoint / "kvjax.json").read_text())
    (checkpoint / "kvjax.json").write_text(json.dumps(head | {"config": value}))
    with pytest.raises(InputError, match="does not describe a model"):
        load(checkpoint)


def test_json_that_nests_without_end(folder):
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="nests its JSON too deeply"):
        load(folder)


def test_a_tensor_in_two_files(folder):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    with pytest.raises(InputError, match=r"is in a\.safetensors and in b\.safetensors"):
        load(folder)


def test_mistrals_second_copy_is_no_error(fixture, folder):
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    save_file({"other.names": np.zeros(3)}, folder / "consolidated.safetensors")
    assert hf_fixtures.relative_error(load(folder)(fixture.tokens), fixture.logits) <= hf_fixtures.BAR


# --- checkpoints -------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(folder, tmp_path):
    save_checkpoint(load_hf(folder), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_a_newer_checkpoint(checkpoint):
    head = json.loads((checkpoint / "kvjax.json").read_text())
    (checkpoint / "kvjax.json").write_text(json.dumps(head | {"format": 9}))
    with pytest.raises(InputError, match="format 9, this kvjax reads 1"):
        load(checkpoint)


def test_a_checkpoint_with_an_unknown_setting(checkpoint):
    head = json.loads((checkpoint / "kvjax.json").read_text())
    head["config"]["surprise"] = 1
    (checkpoint / "kvjax.json").write_text(json.dumps(head))
    with pytest.raises(InputError, match="does not describe a model.*surprise"):
        load(checkpoint)


def test_a_checkpoint_without_its_weights(checkpoint):
    shutil.rmtree(checkpoint / "params")
    with pytest.raises(InputError, match="has no weights"):
        load(checkpoint)


def test_a_checkpoint_with_broken_weights(checkpoint):
    (checkpoint / "params" / "_METADATA").write_text("{")
    with pytest.raises(InputError, match="weights in .* cannot be read"):
        load(checkpoint)


def test_a_checkpoint_with_weights_of_another_shape(checkpoint):
    head = json.loads((checkpoint / "kvjax.json").read_text())
    head["config"]["d_ff"] = 14
    (checkpoint / "kvjax.json").write_text(json.dumps(head))
    with pytest.raises(
        InputError, match=r"layers.0.down \(expected \(1, 14, 24\), found \(1, 28, 24\)\), layers"
    ):
        load(checkpoint)


def test_no_checkpoint(folder):
    with pytest.raises(InputError, match=r"not a kvjax checkpoint: it has no kvjax\.json"):
        load_checkpoint(folder)


# --- writing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [save_hf, save_checkpoint])
def test_unwritable_output(save, folder):
    model = load_hf(folder)
    with pytest.raises(InputError, match="cannot be written"):
        save(model, folder / "config.json" / "out")
    with pytest.raises(InputError, match="exists and holds no"):
        save(model, folder / "config.json")


def test_a_config_that_transformers_has_not_leaves_no_files(folder, tmp_path):
    model = load_hf(folder)
    odd = dataclasses.replace(model, config=dataclasses.replace(model.config, embed_scale=2.0))
    with pytest.raises(InputError, match="no embed_scale = 2.0: use save_checkpoint"):
        save_hf(odd, tmp_path / "out")
    assert not (tmp_path / "out").exists()
