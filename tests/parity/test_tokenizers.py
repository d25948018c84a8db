"""Live against transformers: what a text becomes, whatever files a tokenizer comes in."""

import random

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from kvjax.models.added_tokens import EVEN_BPE
from kvjax.models.tokenizer import read_text
from kvjax.train.data.byte_tokenizer import byte_tokenizer
from tests.models.tokenizer_cases import CASES, SHOWN, TEXT, Files, tokenizer, write

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


@pytest.mark.parametrize("clean", [True, False, "not a BPE"])
def test_texts_are_shown_as_theirs_are(clean, tmp_path):
    asked = {"clean_up_tokenization_spaces": bool(clean), EVEN_BPE: clean is True}
    write(Files([], {**asked, **_HF}), tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), read_text(tmp_path).tokenizer
    if clean == "not a BPE" and not hasattr(theirs, EVEN_BPE):
        pytest.skip("transformers before 5.7 takes spaces out of what a BPE wrote")
    drawn = random.Random(0)
    for text in [*SHOWN, *("".join(drawn.choices("   .?,'nntsmver", k=12)) for _ in range(500))]:
        ids = ours.encode(text).ids
        assert theirs(text)["input_ids"] == ids
        shown = SHOWN.get(text, ours.decode(ids)) if clean is True else text
        assert ours.decode(ids) == theirs.decode(ids) == shown


def test_words_without_a_decoder_are_joined_as_theirs_are(tmp_path):
    write(Files([], {"clean_up_tokenization_spaces": True, **_HF}), tmp_path)
    words = {"it": 0, "'s": 1, ",": 2, ".": 3, "'": 4}
    Tokenizer(models.WordLevel(vocab=words, unk_token="it")).save(str(tmp_path / "tokenizer.json"))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), read_text(tmp_path).tokenizer
    drawn = random.Random(0)
    for _ in range(100):
        ids = drawn.choices(range(5), k=8)
        assert ours.decode(ids) == theirs.decode(ids)
