"""Quantised Hugging Face checkpoints load as the plain weights that they stand for."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from kvjax.base.errors import InputError
from kvjax.io.load import load
from kvjax.models import hf
from kvjax.models.files import read_header
from kvjax.models.hf import save_hf
from kvjax.models.hf_config import config_from_hf
from kvjax.models.model import Model
from kvjax.models.quantised.matrices import AffineMatrix
from kvjax.models.quantised.reader import plain_tensors
from kvjax.models.quantised.settings import quantisation_of
from tests.models.conversation import parameters
from tests.models.gguf_files import checkpoint
from tests.models.hf_cases import CASES
from tests.models.quantised_files import ANY_SIZE, FLOAT_4, FORMATS, is_quantised, quantise, write
from tests.models.test_hf import assert_same_params, tensor_parallel
from tests.sweep import sweep

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_hidden_layers": 1, "vocab_size": 30,
}  # fmt: skip
LLAMA = CASES["llama_mqa_tied"] | SIZES
RECORDED = Path(__file__).parents[1] / "fixtures" / "quantised.safetensors"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Weights whose sizes are multiples of 32."""
    folder = checkpoint(LLAMA, tmp_path_factory.mktemp("llama"))
    return load_file(folder / "model.safetensors")


def opened(folder, config):
    """Open the plain tensors of a quantised directory, none read yet."""
    return plain_tensors(read_header(folder / "model.safetensors"), quantisation_of(config), ())


@pytest.mark.rotating
@pytest.mark.parametrize(
    "form",
    sweep(FORMATS, "fp8_blocks", "packed4_zeros", "gptq4_order", "awq", "int8_zeros", "nvfp4", "mxfp4"),
)
def test_a_layout_gives_the_weights_that_it_stands_for(form, llama, tmp_path):
    config, stored, plain = quantise(LLAMA, llama, FORMATS[form])
    found = opened(write(tmp_path, config, stored), config)
    assert set(found) == set(plain) and len(stored) > len(plain)
    for name, expected in plain.items():
        # NVFP4 divides two scales before it multiplies: one unit in the last place.
        np.testing.assert_allclose(found[name].read(), expected, rtol=2e-7 if form == "nvfp4" else 0, atol=0)


@pytest.mark.parametrize("form", FORMATS)
def test_a_piece_of_a_weight_is_that_of_the_whole(form, llama, tmp_path):
    rng = np.random.default_rng(0)
    name = "model.layers.0.mlp.up_proj.weight"
    config, stored, _ = quantise(LLAMA, {name: llama[name]}, FORMATS[form])
    up = opened(write(tmp_path, config, stored), config)[name]
    whole = up.read()
    for _ in range(8):
        rows, columns = (slice(*sorted(rng.integers(0, n + 1, 2))) for n in whole.shape)
        np.testing.assert_array_equal(up.read(rows, columns), whole[rows, columns])
        np.testing.assert_array_equal(up.read(rows), whole[rows])


FAMILIES = [(name, "fp8_blocks") for name in CASES] + [(name, "packed4_zeros") for name in CASES]


with safe_open(RECORDED, "np") as file:
    LIBRARIES = {name: json.loads(text) for name, text in sorted(file.metadata().items())}


@pytest.mark.parametrize("case", LIBRARIES)
def test_weights_are_those_that_the_library_reads(case):
    # AutoGPTQ, AutoAWQ and compressed-tensors: scripts/fixtures/record_quantised.py.
    stored = {n: t for n, t in read_header(RECORDED).items() if n.startswith(f"{case}.")}
    expected, dtype = stored.pop(f"{case}.expected").read(), LIBRARIES[case]["dtype"]
    [weight] = plain_tensors(stored, quantisation_of(LIBRARIES[case]), ()).values()
    # Where a library multiplies in 16 bits, its numbers are ours rounded; NVFP4 is rounded twice there.
    tolerance = 2**-7 if case == "nvfp4" else 0
    np.testing.assert_allclose(weight.read().astype(dtype).astype(np.float32), expected, tolerance, 0)


@pytest.mark.parametrize(
    ("name", "form"),
    sweep(
        FAMILIES,
        ("mamba2", "fp8_blocks"),
        ("llama_mqa_tied", "packed4_zeros"),
    ),
)
def test_a_family_loads_from_quantised_weights(name, form, tmp_path):
    weights = load_file(checkpoint(CASES[name], tmp_path / "made") / "model.safetensors")
    config, stored, plain = quantise(CASES[name], weights, ANY_SIZE[form])
    expected = load(write(tmp_path / "plain", CASES[name], plain))
    assert_same_params(expected, load(write(tmp_path / "quantised", config, stored, shards=2)))


@pytest.mark.parametrize("form", ["gptq4_order", "awq"])
def test_devices_read_their_pieces_a_few_rows_at_a_time(form, llama, tmp_path, monkeypatch):
    config, stored, plain = quantise(LLAMA, llama, FORMATS[form])
    expected = load(write(tmp_path / "plain", LLAMA, plain), dtype=jnp.bfloat16)
    decode, pieces = AffineMatrix.__getitem__, []

    def count(weight, index):
        pieces.append(decode(weight, index))
        return pieces[-1]

    monkeypatch.setattr(AffineMatrix, "__getitem__", count)
    monkeypatch.setattr(hf, "_BLOCK_ROWS", 5)
    found = load(write(tmp_path / "a", config, stored), dtype=jnp.bfloat16, sharding=tensor_parallel)
    assert_same_params(expected, found)
    # No row twice, though four devices read.
    assert sum(x.size for x in pieces) == sum(x.size for n, x in plain.items() if is_quantised(n, x))
    assert max(len(x) for x in pieces) == 5


@pytest.mark.parametrize(
    ("form", "name", "settings"),
    [
        ("gptq4_words", "quantize_config.json", {"bits": 4, "group_size": 16, "desc_act": False}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 16, "version": "GEMM", "zero_point": True}),
    ],
)
def test_settings_in_a_file_of_their_own_are_found(form, name, settings, llama, tmp_path):
    config, stored, _ = quantise(LLAMA, llama, FORMATS[form])
    expected = load(write(tmp_path / "a", config, stored))
    folder = write(tmp_path / "b", LLAMA, stored)
    (folder / name).write_text(json.dumps(settings))
    assert_same_params(expected, load(folder))


def experts(folder, **parts):
    """Tensors of MXFP4 experts in a file, and the plain ones that they stand for."""
    save_file({f"mlp.experts.down_proj_{part}": x for part, x in parts.items()}, folder / "model.safetensors")
    return opened(folder, {"quantization_config": {"quant_method": "mxfp4"}})


def test_experts_of_mxfp4_are_floats_of_4_bits_times_powers_of_two(tmp_path):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (3, 5, 2, 32))
    exponents = rng.integers(100, 140, (3, 5, 2))
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    [found] = experts(tmp_path, blocks=blocks, scales=exponents.astype(np.uint8)).values()
    numbers = np.array([*FLOAT_4, *(-x for x in FLOAT_4)])[codes] * 2.0 ** (exponents[..., None] - 127)
    # A plain checkpoint has inputs before outputs.
    expected = numbers.reshape(3, 5, 64).swapaxes(1, 2)
    assert found.name == "mlp.experts.down_proj" and found.shape == (3, 64, 5)
    np.testing.assert_array_equal(found.read(), expected)
    piece = np.s_[1:3, 7:40, 2:4]
    np.testing.assert_array_equal(found.read(*piece), expected[piece])


def test_experts_of_mxfp4_need_scales_that_fit(tmp_path):
    blocks = np.zeros((3, 5, 2, 16), np.uint8)
    with pytest.raises(
        InputError, match="down_proj_blocks is quantised and lacks mlp.experts.down_proj_scales"
    ):
        experts(tmp_path, blocks=blocks)
    with pytest.raises(InputError, match=r"down_proj_scales \[3, 5, 1\] of U8, expected \[experts, outputs"):
        experts(tmp_path, blocks=blocks, scales=np.zeros((3, 5, 1), np.uint8))


def test_gpt_oss_loads_from_experts_of_mxfp4(tmp_path):
    case = CASES["gpt_oss"] | {"hidden_size": 32, "intermediate_size": 64}
    model = Model(config_from_hf(case), parameters(config_from_hf(case)))
    save_hf(model, tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    weights, stored = load_file(tmp_path / "plain" / "model.safetensors"), {}
    rng, table = np.random.default_rng(0), np.array([*FLOAT_4, *(-x for x in FLOAT_4)])
    for name, plain in weights.items():
        if not name.endswith(("gate_up_proj", "experts.down_proj")):
            stored[name] = plain
            continue
        experts, inputs, outputs = plain.shape
        codes = rng.integers(0, 16, (experts, outputs, inputs // 32, 32))
        exponents = rng.integers(120, 127, codes.shape[:3])
        stored[f"{name}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
        stored[f"{name}_scales"] = exponents.astype(np.uint8)
        numbers = table[codes] * 2.0 ** (exponents[..., None] - 127)
        numbers = numbers.reshape(experts, outputs, inputs).swapaxes(1, 2)
        weights[name] = np.ascontiguousarray(numbers, np.float32)
    expected = load(write(tmp_path / "a", config, weights))
    quantised = config | {"quantization_config": {"quant_method": "mxfp4"}}
    found = load(write(tmp_path / "b", quantised, stored))
    assert_same_params(expected, found)
    # Gates are the even columns of a tensor, ups the odd ones.
    name = "model.layers.1.mlp.experts.gate_up_proj"
    both = weights[name][3]
    for leaf, columns in (("gate", both[:, 0::2]), ("up", both[:, 1::2])):
        np.testing.assert_array_equal(found.params["layers"][1][f"experts_{leaf}"][0, 3], columns)
