"""GGUF files: what is loaded is what the same checkpoint gives as a Hugging Face directory."""

import dataclasses

import jax
import numpy as np
import pytest

from kvjax.commands.inspect_model import find_config
from kvjax.io.load import load
from tests.models.gguf_files import CASES, write_case
from tests.models.hf_fixtures import relative_error
from tests.sweep import sweep

TOKENS = np.random.default_rng(0).integers(0, 80, (1, 40)).astype(np.int32)


def assert_same(ours, theirs):
    """Params of a GGUF file are those of the directory, up to one rounding of what its conversion changed."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=4e-7, strict=True), ours, theirs)


@pytest.mark.parametrize(
    "name", sweep(CASES, "llama", "mixtral", "gemma3", "phi3", "olmo2", "deepseek_v3", "mamba2_groups")
)
def test_a_model_is_that_of_its_directory(name, tmp_path):
    directory, file = write_case(name, tmp_path)
    ours, theirs = load(file), load(directory)
    assert_same(ours.params, theirs.params)
    assert relative_error(ours(TOKENS), np.asarray(theirs(TOKENS))) < 1e-5
    assert ours.name == name


@pytest.mark.parametrize("name", CASES)
def test_a_config_is_that_of_its_directory(name, tmp_path):
    directory, file = write_case(name, tmp_path)
    ours, theirs = find_config(str(file))[0], find_config(str(directory))[0]
    if name == "llama_llama3":
        # Settings that give the same frequencies: those that made them are not in the file.
        np.testing.assert_allclose(ours.rope.frequencies(8), theirs.rope.frequencies(8), rtol=1e-6)
        ours = dataclasses.replace(ours, rope=theirs.rope)
    assert ours == theirs
