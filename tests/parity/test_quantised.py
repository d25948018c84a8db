"""Live against transformers' own reading of quantised weights: FP8 blocks in a model, and MXFP4 experts."""

import importlib
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers import quantizer_finegrained_fp8

from kvjax.io.load import load
from kvjax.models.files import read_header
from kvjax.models.quantised.reader import plain_tensors
from kvjax.models.quantised.settings import Quantisation
from tests.models import hf_reference
from tests.models.gguf_files import checkpoint
from tests.models.hf_cases import CASES
from tests.models.hf_fixtures import relative_error
from tests.models.quantised_files import FORMATS, quantise, write

pytestmark = pytest.mark.parity
# Theirs divides matrices into whole blocks.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


# Experts of FP8 keep their codes there (5.2).
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_logits_of_fp8_blocks_are_theirs(name, tmp_path, monkeypatch):
    # Their module asks for packages that only run models on GPUs, and compiles for these.
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda function: function)
        for package in ("triton", "triton.language"):
            patch.setitem(sys.modules, package, MagicMock())
        importlib.import_module("transformers.integrations.finegrained_fp8")
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    case = CASES[name] | SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2}
    weights = load_file(checkpoint(case, tmp_path / "made") / "model.safetensors")
    config, stored, _ = quantise(case, weights, FORMATS["fp8_blocks"])
    folder = write(tmp_path / "quantised", config, stored)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=FineGrainedFP8Config(weight_block_size=(16, 8), dequantize=True),
    ).eval()
    theirs.config._experts_implementation = "eager"
    tokens = np.random.default_rng(0).integers(0, case["vocab_size"], (2, 16))
    assert relative_error(load(folder)(tokens), hf_reference.logits(theirs, tokens)) <= 1e-5


def test_experts_of_mxfp4_are_theirs(tmp_path):
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 20, 4, 16), dtype=np.uint8)
    scales = rng.integers(110, 140, (3, 20, 4), dtype=np.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    file = Path(tmp_path / "model.safetensors")
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, file)
    found = plain_tensors(read_header(file), Quantisation("mxfp4", {}), ())
    expected = convert_moe_packed_tensors(
        torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
    ).numpy()
    assert found[name].shape == expected.shape == (3, 128, 20)
    np.testing.assert_array_equal(found[name].read(), expected)
