"""Live against transformers' own GGUF loading: logits and greedy tokens of one file in both, and ids."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.ggml import convert_gguf_tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN_3_5

from kvjax.io.load import load
from kvjax.models.gguf.pre_tokenizers import SPLITS
from kvjax.models.gguf.text import text_of
from tests.models import hf_reference
from tests.models.gguf_files import CASES, checkpoint, write_gguf
from tests.models.hf_fixtures import relative_error
from tests.models.test_gguf_text import PAGE, QWEN_2, byte_level, sentence_pieces, trained, write_text

pytestmark = pytest.mark.parity
BAR = 1e-4
GREEDY = 24

# What theirs does not read from a file has its default there: Gemma's scale, Qwen3's heads, Phi-3's window.
_LLAMA = {"hidden_size": 32, "head_dim": 32, "num_attention_heads": 4, "intermediate_size": 64}
_WIDE = {"head_dim": 256, "query_pre_attn_scalar": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
READ = {
    "llama": ("llama", CASES["llama_tied"][1] | _LLAMA),
    "qwen2": ("qwen2", CASES["qwen2"][1]),
    "qwen3": ("qwen3", CASES["qwen3"][1] | {"head_dim": 128, "attention_bias": False}),
    "qwen3_moe": ("qwen3moe", CASES["qwen3_moe"][1] | {"moe_intermediate_size": 768}),
    "gemma2": (
        "gemma2",
        CASES["gemma2"][1] | _WIDE | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "gemma3",
        {k: v for k, v in CASES["gemma3"][1].items() if k != "rope_scaling"} | _WIDE
        | {"num_hidden_layers": 7, "sliding_window_pattern": 6, "rope_local_base_freq": 1e4},
    ),
    "phi3": ("phi3", CASES["phi3"][1] | {"partial_rotary_factor": 1.0, "sliding_window": None}),
}  # fmt: skip
KINDS = {"llama": "Q8_0", "qwen2": "F16"}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices this small are slower on many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def written(name, folder):
    arch, config = READ[name]
    weights = load_file(checkpoint(config, folder / "hub") / "model.safetensors")
    keys = {f"{arch}__vocab_size": config["vocab_size"], "tokenizer__ggml__padding_token_id": 0}
    return write_gguf(folder / "a.gguf", arch, config, weights, KINDS.get(name, "F32"), **keys)


@pytest.mark.parametrize("name", READ)
def test_logits_and_greedy_tokens_are_those_of_transformers(name, tmp_path):
    file = written(name, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = np.random.default_rng(1).integers(1, 80, (2, 30)).astype(np.int32)
    tokens = hf_reference.greedy(theirs, tokens, GREEDY)
    expected, found = hf_reference.logits(theirs, tokens), np.asarray(load(file)(tokens))
    assert relative_error(found, expected) <= BAR
    np.testing.assert_array_equal(found[:, -GREEDY - 1 : -1].argmax(-1), tokens[:, -GREEDY:])


def test_published_patterns_are_those_of_transformers():
    assert SPLITS["qwen35"].patterns == (QWEN_3_5,)
    assert QWEN_2 == PRETOKENIZE_REGEX
    assert QWEN_2.replace(r"|\p{N}|", r"|\p{N}{1,3}|") == TikTokenConverter().pattern


def test_ids_of_a_qwen2_file_are_those_of_transformers(tmp_path):
    made = trained("qwen2")
    file = byte_level(tmp_path / "a.gguf", made, "qwen2")
    read = {key: file.get(f"tokenizer.ggml.{key}") for key in ("tokens", "merges", "token_type")}
    theirs, _ = convert_gguf_tokenizer("qwen2", dict(read))
    assert text_of(file).tokenizer.encode(PAGE).ids == theirs.encode(PAGE).ids


def test_ids_of_a_sentence_piece_file_are_those_of_transformers(tmp_path):
    pieces, kinds, scores = sentence_pieces()
    keys = dict(scores=scores, token_type=kinds, unknown_token_id=0, bos_token_id=1, eos_token_id=2)
    ours = text_of(write_text(tmp_path / "a.gguf", pieces, "llama", **keys)).tokenizer
    read = {"tokens": pieces, "scores": scores, "token_type": kinds, "tokenizer_type": "llama"}
    ids = {"unk_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    theirs, _ = convert_gguf_tokenizer("llama", read | ids)
    for text in ("the there hello", "hello, 12 é🎉 the.", "herhellthere"):
        found = ours.encode(text, add_special_tokens=False).ids
        assert found == theirs.encode(text, add_special_tokens=False).ids
