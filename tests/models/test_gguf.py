"""GGUF files: what is loaded is what the same checkpoint gives as a Hugging Face directory."""

import gguf
import jax
import numpy as np
import pytest

from kvjax.commands.inspect_model import find_config
from kvjax.io.load import load
from kvjax.models.gguf.reader import open_gguf
from kvjax.models.gguf.rope import rope_fields
from kvjax.ops.base.rope import Rope
from tests.models.gguf_files import CASES, llama3_divisors, write_case
from tests.models.hf_fixtures import relative_error

TOKENS = np.random.default_rng(0).integers(0, 80, (1, 40)).astype(np.int32)


def write_tensors(path, tensors, freq_base=10000.0):
    """A GGUF file of nothing but a few tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_rope_freq_base(freq_base)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same(ours, theirs):
    """Params of a GGUF file are those of the directory, up to one rounding of what its conversion changed."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=4e-7, strict=True), ours, theirs)


@pytest.mark.parametrize("name", CASES)
def test_config_and_params_are_those_of_the_directory(name, tmp_path):
    directory, file = write_case(name, tmp_path)
    ours, theirs = load(file), load(directory)
    assert_same(ours.params, theirs.params)
    assert ours.name == name
    assert ours.config == theirs.config == find_config(str(file))[0]


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
