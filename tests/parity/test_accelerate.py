"""Weights in host memory beside Hugging Face Accelerate: the same tokens, as many bytes for every step."""

import jax
import numpy as np
import pytest
import torch

import kvjax
from kvjax.serve import Prompt, run
from scripts.bench import weights

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

# Accelerate leaves the model on no device, of which transformers warns.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore:You are calling .generate")]
SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
)  # fmt: skip
NEW = 8


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Build a decoder of transformers' with weights that Accelerate keeps on the host, and one of kvjax."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    theirs.save_pretrained(folder)
    model = kvjax.load(folder)
    return accelerate.cpu_offload(theirs, execution_device="cpu"), model


def test_a_step_from_every_memory_writes_the_same_tokens(tmp_path):
    sides, size = weights.all_sides(2, 1, str(tmp_path))
    found = weights.measured(sides, 1)
    assert {"Accelerate, `disk_offload`", "kvjax, in host memory (`hf_accelerate`)"} < found.keys()
    assert size == sum(x.nbytes for x in jax.tree.leaves(kvjax.load(tmp_path).params))


def brought(theirs, rows, monkeypatch):
    """Bytes of the weights that Accelerate brings for one step of so many rows."""
    found, call = [], accelerate.hooks.set_module_tensor_to_device

    def heard(module, name, device, value=None, **more):
        if value is not None and str(device) != "meta":
            found.append(value.numel() * value.element_size())
        return call(module, name, device, value=value, **more)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(accelerate.hooks, "set_module_tensor_to_device", heard)
        theirs(torch.zeros((rows, 1), dtype=torch.long), use_cache=False)
    return sum(found)


def test_requests_get_the_tokens_that_an_offloaded_model_generates(both):
    theirs, model = both
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, SIZES["vocab_size"], n).tolist() for n in (5, 9, 14)]
    done = run(model, [Prompt(text, NEW, stop=[]) for text in texts], "hf_accelerate(rows=4, longest=64)")
    for text, answer in zip(texts, done.answers, strict=True):
        with torch.no_grad():
            want = theirs.generate(
                torch.tensor([text]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert answer.tokens.tolist() == want[0, len(text) :].tolist()


def test_a_step_brings_all_weights_whatever_its_rows(both, monkeypatch):
    theirs, model = both
    whole = sum(x.nbytes for x in jax.tree.leaves(model.params))
    for rows in (1, 8):
        assert brought(theirs, rows, monkeypatch) == whole
