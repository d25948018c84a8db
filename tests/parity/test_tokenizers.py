"""Live against transformers: what a text becomes, whatever files a tokenizer comes in."""

import pytest
from transformers import AutoTokenizer

from kvjax.models.tokenizer import read_text
from tests.models.tokenizer_cases import CASES, TEXT, Files, tokenizer, write

pytestmark = pytest.mark.parity
_HF = {"tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.mark.parametrize("name", CASES)
def test_ids_vocabulary_and_names_are_equal(name, tmp_path):
    files = CASES[name]
    files = files._replace(tokenizer_config=files.tokenizer_config | _HF)
    if files.special_tokens_map:
        # Theirs takes no "special" in this file.
        named = {
            key: {k: v for k, v in value.items() if k != "special"} if isinstance(value, dict) else value
            for key, value in files.special_tokens_map.items()
        }
        files = files._replace(special_tokens_map=named)
    theirs, ours = AutoTokenizer.from_pretrained(write(files, tmp_path)), read_text(tmp_path)
    assert theirs(TEXT)["input_ids"] == ours.tokenizer.encode(TEXT).ids == files.ids
    assert theirs.get_vocab() == ours.tokenizer.get_vocab()
    assert theirs.eos_token_id in (None, *ours.stop_ids)
    names = theirs.special_tokens_map
    if name == "truncation and padding":
        names.pop("pad_token")  # theirs takes its name from the padding, which ours switches off
    assert names == ours.special_tokens


def test_ids_that_contradict_the_files_are_theirs_alone(tmp_path):
    """transformers gives the token another id than its file says, without a word; kvjax refuses the file."""
    gap = {"added_tokens_decoder": {"20": {"content": "<pad>", "special": True}}, **_HF}
    made = AutoTokenizer.from_pretrained(write(Files([], gap), tmp_path))
    assert made.convert_tokens_to_ids("<pad>") == tokenizer().get_vocab_size() == 12
