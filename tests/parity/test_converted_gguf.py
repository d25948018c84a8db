"""Files that llama.cpp's converter made, against transformers' model of the checkpoint that was converted."""

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from kvjax.io.load import load
from tests.models import hf_reference
from tests.models.gguf_files import CONVERTED, checkpoint
from tests.models.hf_fixtures import relative_error
from tests.models.test_gguf import recorded

pytestmark = pytest.mark.parity
BAR = 1e-4
NEWER = pytest.mark.skipif(transformers.__version__.startswith("5.2."), reason="needs a newer transformers")
NAMES = (
    pytest.param("bamba", marks=NEWER), pytest.param("gemma3n", marks=NEWER),
    pytest.param("kimi_linear", marks=NEWER), "falcon_h1", "falcon_h1_plain",
    "jamba",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name, tmp_path):
    directory = checkpoint(CONVERTED[name], tmp_path / "hub", rounded=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = np.random.default_rng(2).integers(0, 60, (2, 30)).astype(np.int32)
    found = np.asarray(load(recorded(name, tmp_path))(tokens))
    assert relative_error(found, hf_reference.logits(theirs, tokens)) <= BAR
