"""GGUF files: what is loaded is what the same checkpoint gives as a Hugging Face directory."""

import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest

from kvjax.base.errors import InputError
from kvjax.commands.inspect_model import find_config
from kvjax.io.load import load
from kvjax.models.gguf.load import config_of_gguf
from kvjax.models.gguf.reader import open_gguf
from kvjax.models.gguf.rope import rope_fields
from kvjax.models.gguf.weights import is_later, stored_tensors
from kvjax.ops.base.rope import Rope
from tests.models.gguf_files import CONVERTED, RECORDED, checkpoint, llama3_divisors, write_case
from tests.models.hf_fixtures import relative_error
from tests.sweep import sweep

TOKENS = np.random.default_rng(0).integers(0, 80, (1, 40)).astype(np.int32)


def write_tensors(path, tensors, freq_base=10000.0):
    """Write a GGUF file of nothing but a few tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_rope_freq_base(freq_base)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def recorded(name, folder):
    """Read the file that llama.cpp's converter made of a case."""
    with zipfile.ZipFile(RECORDED) as files:
        return Path(files.extract(f"{name}.gguf", folder))


def assert_same(ours, theirs):
    """Params of a GGUF file are those of the directory, up to one rounding of what its conversion changed."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=4e-7, strict=True), ours, theirs)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "name",
    sweep(
        [n for n in CONVERTED if n != "glm_4_flash" and "falcon_h1" not in n],
        "llama_llama3",
        "gpt_oss",
        "mamba2",
    ),
)
def test_what_llama_cpp_converts_is_read_back(name, tmp_path):
    directory = checkpoint(CONVERTED[name], tmp_path / "hub", rounded=True)
    file = recorded(name, tmp_path)
    ours, theirs = load(file), load(directory)
    assert ours.name == name
    assert ours.config == find_config(str(file))[0]
    assert_same(ours.params, theirs.params)
    if (
        ours.config.rope.kind == "llama3"
    ):  # Files hold what frequencies are divided by, as do several settings.
        size = ours.config.head_dim
        found, expected = (model.config.rope.frequencies(size) for model in (ours, theirs))
        np.testing.assert_allclose(found, expected, rtol=2e-6)
        ours = replace(ours, config=replace(ours.config, rope=theirs.config.rope))
    assert ours.config == theirs.config


@pytest.mark.rotating
def test_glm_4_flash_is_read_as_the_deepseek_that_it_is(tmp_path):
    file, directory = recorded("glm_4_flash", tmp_path), tmp_path / "hub"
    checkpoint(CONVERTED["glm_4_flash"], directory, rounded=True)
    np.testing.assert_array_equal(load(file)(TOKENS), load(directory)(TOKENS))


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["falcon_h1", "falcon_h1_plain"])
def test_falcon_h1_has_its_factors_in_its_tensors(name, tmp_path):
    directory = checkpoint(CONVERTED[name], tmp_path / "hub", rounded=True)
    ours, theirs = load(recorded(name, tmp_path)), load(directory)
    assert {m.out_scale for m in ours.config.mixers} == {1.0} != {m.out_scale for m in theirs.config.mixers}
    assert relative_error(ours(TOKENS), np.asarray(theirs(TOKENS))) < 1e-5


def test_falcon_h1_with_tied_embeddings_is_refused(tmp_path):
    file = open_gguf(recorded("falcon_h1", tmp_path))
    tied = {name: held for name, held in file.tensors.items() if name != "output.weight"}
    with pytest.raises(InputError, match="loses lm_head_multiplier. Give the directory"):
        config_of_gguf(file._replace(tensors=tied))


def test_per_layer_embeddings_without_their_padding_are_as_many_as_the_models(tmp_path):
    file = open_gguf(recorded("gemma3n", tmp_path))
    assert file.tensors["per_layer_token_embd.weight"].shape[0] == 80
    assert config_of_gguf(file).layer_vocab == 71


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("rwkv7", "blk.1.time_mix_lerp_fused.weight"),
        ("gemma3n", "altup_unembd_proj.weight"),
        ("qwen3_next", "blk.0.attn_gate.weight"),
        ("granite_4", "blk.0.ffn_up_exps.weight"),
        ("gpt_oss", "blk.1.ffn_gate_exps.bias"),
    ],
)
def test_a_part_of_a_tensor_that_is_missing_or_misshapen_is_named(name, tensor, tmp_path):
    file = open_gguf(recorded(name, tmp_path))
    config = config_of_gguf(file)
    without = {key: held for key, held in file.tensors.items() if key != tensor}
    with pytest.raises(InputError, match=f"1 missing: {tensor}"):
        stored_tensors(file._replace(tensors=without), config)
    held = file.tensors[tensor]
    short = held._replace(data=held.data[..., :-1], shape=(*held.shape[:-1], held.shape[-1] - 1))
    with pytest.raises(InputError, match=f"1 of another shape: .*{tensor}"):
        stored_tensors(file._replace(tensors=file.tensors | {tensor: short}), config)


def test_layers_that_predict_later_tokens_are_not_read(tmp_path):
    file = recorded("glm4_moe", tmp_path)
    opened = open_gguf(file)
    later = dict(opened.tensors) | {"blk.3.nextn.eh_proj.weight": opened.tensors["token_embd.weight"]}
    config = config_of_gguf(opened)
    assert set(stored_tensors(opened._replace(tensors=later), config)) == set(stored_tensors(opened, config))
    assert is_later("blk.3.nextn.eh_proj.weight", config)
    assert not is_later("blk.2.attn_q.weight", config)


def test_keys_of_layers_that_read_those_of_lower_ones_are_not_read(tmp_path):
    file = open_gguf(recorded("gemma4", tmp_path))
    config = config_of_gguf(file)
    names = set(stored_tensors(file, config))
    both = file.tensors | {"blk.4.attn_k.weight": file.tensors["blk.1.attn_k.weight"]}
    assert set(stored_tensors(file._replace(tensors=both), config)) == names
    lower = file.tensors | {"blk.2.attn_k.bias": file.tensors["blk.1.attn_k.weight"]}
    with pytest.raises(InputError, match="1 not expected: blk.2.attn_k.bias"):
        stored_tensors(file._replace(tensors=lower), config)


def test_logits_are_those_of_the_directory(tmp_path):
    directory, file = write_case("llama_llama3", tmp_path)
    assert relative_error(load(file)(TOKENS), np.asarray(load(directory)(TOKENS))) < 1e-6


@pytest.mark.parametrize(
    ("theta", "size", "numbers"),
    [
        (5e5, 128, (8.0, 1.0, 4.0)),
        (5e5, 64, (32.0, 1.0, 4.0)),
        (5e5, 64, (7.5, 1.2, 5.0)),
        (1e8, 16, (9, 0.7, 3)),
    ],
)
def test_rope_freqs_give_back_llama3_scaling(theta, size, numbers, tmp_path):
    names = ("factor", "low_freq_factor", "high_freq_factor")
    scaling = dict(zip(names, numbers, strict=True)) | {"original_max_position_embeddings": 8192}
    divisors = llama3_divisors(scaling, theta, size)
    file = open_gguf(write_tensors(tmp_path / "a.gguf", {"rope_freqs.weight": divisors}, freq_base=theta))
    found = rope_fields(file, size)["rope_scaling"]
    rope = Rope(theta, "llama3", found["factor"], 8192, *(found[name] for name in names[1:]))
    plain = theta ** (-np.arange(0, size, 2) / size)
    np.testing.assert_allclose(rope.frequencies(size), plain / divisors, rtol=2e-6)
    if size >= 64:  # with fewer frequencies, other settings give the same
        assert tuple(found[name] for name in names) == numbers
