"""Whatever is wrong with a quantised checkpoint gets one clear sentence before any weight is read."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvjax.base.errors import InputError
from kvjax.io.load import load
from kvjax.models import hf
from kvjax.models.hf_config import config_from_hf
from tests.models.gguf_files import checkpoint
from tests.models.quantised_files import FORMATS, quantise, write
from tests.models.test_quantised import LLAMA

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return load_file(checkpoint(LLAMA, tmp_path_factory.mktemp("llama")) / "model.safetensors")


@pytest.fixture
def unread(monkeypatch):
    """Fails where the loader gets as far as reading weights."""

    def read(*_):
        raise AssertionError("weights were read")

    monkeypatch.setattr(hf, "_read_params", read)


COMPRESSED = {"quant_method": "compressed-tensors"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            r"quantised \(bitsandbytes\), expected one of fp8",
        ),
        ({"quant_method": "torchao"}, "compressed-tensors, awq, gptq, mxfp4: choose another checkpoint"),
        ({"bits": 4}, r"quantised \(unknown\)"),
        ({"quant_method": ["gptq"]}, r"quantised \(\['gptq'\]\)"),
        ({"quant_method": "gptq", "bits": 5}, "bits = 5, expected one of 2, 3, 4, 8"),
        ({"quant_method": "gptq", "bits": "four"}, "bits = 'four', expected one of 2, 3, 4, 8"),
        (
            {"quant_method": "gptq", "checkpoint_format": "marlin"},
            "format = 'marlin', expected gptq or gptq_v2",
        ),
        ({"quant_method": "gptq", "pack_dtype": "int16"}, "pack_dtype = 'int16', expected int32"),
        ({"quant_method": "gptq", "rotation": "hadamard"}, "rotation = 'hadamard', expected none"),
        ({"quant_method": "awq", "bits": 8}, "bits = 8, expected 4"),
        ({"quant_method": "awq", "version": "gemv"}, "version = 'gemv', expected gemm"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point = False, expected true"),
        (COMPRESSED | {"format": "marlin-24"}, "format = 'marlin-24', expected one of dense"),
        (
            COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config = .*expected none",
        ),
        (
            COMPRESSED | {"transform_config": {"config_groups": {"u": {}}}},
            "transform_config = .*expected none",
        ),
        (COMPRESSED | {"config_groups": "all"}, "config_groups = 'all', expected an object"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            r"weight_block_size = \[128\], expected two whole",
        ),
    ],
)
def test_what_is_not_read_is_said_from_config_json(settings, message):
    with pytest.raises(InputError, match=message):
        config_from_hf(LLAMA | {"quantization_config": settings})


def test_the_quantisation_of_a_model_with_vision_is_seen():
    outer = {"model_type": "gemma3", "text_config": LLAMA, "quantization_config": {"quant_method": "quark"}}
    with pytest.raises(InputError, match=r"quantised \(quark\)"):
        config_from_hf(outer)


def without(part):
    return lambda tensors: tensors.pop(f"{UP}.{part}")


def with_(part, change):
    def edit(tensors):
        name = f"{UP}.{part}"
        tensors[name] = np.ascontiguousarray(change(tensors.get(name)))

    return edit


def cut(x):
    return x[:-1]


@pytest.mark.parametrize(
    ("form", "edit", "message"),
    [
        (
            "fp8_blocks",
            without("weight_scale_inv"),
            r"up_proj is quantised and lacks weight_scale_inv or weight_scale",
        ),
        ("fp8_blocks", with_("weight_scale_inv", cut), r"shape \[5, 8\] and dtype F32, expected \[6, 8\]"),
        (
            "fp8_blocks",
            with_("weight", lambda x: x.astype(np.float32)),
            "dtype F32, expected a matrix of F8_E4M3",
        ),
        (
            "fp8_whole",
            with_("weight_scale_inv", lambda x: np.ones(3, np.float32)),
            r"\[3\].*expected \[\] or \[1\]",
        ),
        ("float_channel", without("weight_scale"), "up_proj is quantised and lacks weight_scale"),
        ("int8_zeros", with_("weight_zero_point", cut), r"weight_zero_point has the shape \[95, 1\]"),
        ("packed4", without("weight_scale"), r"lacks weight_scale \(it has weight_packed, weight_shape\)"),
        ("packed4", with_("weight_shape", lambda x: x + 8), r"\[96, 8\] and dtype I32, expected \[104, 9\]"),
        (
            "packed4",
            with_("weight_scale", lambda x: x[:, :-1]),
            r"\[96, 15\] and dtype F16, expected \[96, 16\]",
        ),
        ("packed4_zeros", with_("weight_zero_point", cut), r"\[11, 16\] and dtype I32, expected \[12, 16\]"),
        ("packed4_order", with_("weight_g_idx", cut), r"weight_g_idx has the shape \[63\]"),
        ("nvfp4", with_("weight_global_scale", lambda x: np.ones(2, np.float32)), r"expected \[\] or \[1\]"),
        ("awq", without("qzeros"), r"lacks qzeros \(it has qweight, scales\)"),
        ("awq", with_("scales", cut), r"qzeros has the shape \[4, 12\] and dtype I32, expected \[3, 12\]"),
        ("gptq4_words", without("scales"), r"lacks scales \(it has g_idx, qweight, qzeros\)"),
        (
            "gptq4_words",
            with_("qzeros", cut),
            r"\[8, 96\] and .*\[3, 12\], expected those of 4-bit integers in 4 groups",
        ),
        ("gptq4_words", with_("g_idx", cut), r"g_idx has the shape \[63\] and dtype I32, expected \[64\]"),
        ("gptq4_words", with_("qweight", cut), r"g_idx has the shape \[64\] and dtype I32, expected \[56\]"),
        (
            "gptq4_unnamed",
            with_("qweight", lambda x: x[:-2]),
            r"scales for 4 groups of inputs, expected 3 of 16",
        ),
        (
            "gptq4_symmetric",
            with_("qzeros", lambda x: x + 2),
            "sym = true, and .* holds zero points other than 8",
        ),
        ("gptq4_words", with_("bias", lambda _: np.ones(96, np.float16)), r"1 not expected: .*up_proj.bias"),
    ],
)
def test_parts_that_do_not_fit_are_named(form, edit, message, llama, tmp_path, unread):
    config, stored, _ = quantise(LLAMA, llama, FORMATS[form])
    edit(stored)
    with pytest.raises(InputError, match=message):
        load(write(tmp_path, config, stored))


def test_weights_of_another_size_are_named(llama, tmp_path, unread):
    config, stored, _ = quantise(LLAMA, llama, FORMATS["packed4"])
    with pytest.raises(InputError, match=r"up_proj.weight \(expected \[80, 64\], found \[96, 64\]\)"):
        load(write(tmp_path, config | {"intermediate_size": 80}, stored))


def test_a_module_that_no_group_names_is_said(llama, tmp_path, unread):
    config, stored, _ = quantise(LLAMA, llama, FORMATS["packed4"])
    [group] = config["quantization_config"]["config_groups"].values()
    groups = {"a": group | {"targets": ["re:.*attn.*"]}, "b": group | {"targets": ["re:.*down_proj"]}}
    config["quantization_config"] = config["quantization_config"] | {"config_groups": groups}
    with pytest.raises(InputError, match="mlp.* is quantised, and none of the 2 config_groups"):
        load(write(tmp_path, config, stored))


def test_groups_that_are_not_there_are_named(llama, tmp_path):
    config, stored, _ = quantise(LLAMA, llama, FORMATS["gptq4_order"])
    stored[f"{UP}.g_idx"][3] = 4
    with pytest.raises(InputError, match="up_proj.g_idx names groups from 0 to 4, expected 0 to 3"):
        load(write(tmp_path, config, stored))


def test_biases_of_zeros_that_the_model_lacks_are_passed_over(llama, tmp_path):
    config, stored, _ = quantise(LLAMA, llama, FORMATS["gptq4_words"])
    expected = load(write(tmp_path / "a", config, stored))
    stored[f"{UP}.bias"] = np.zeros(96, np.float16)
    found = load(write(tmp_path / "b", config, stored))
    np.testing.assert_array_equal(found.params["layers"][0]["up"], expected.params["layers"][0]["up"])
