"""`clean_up_tokenization_spaces`: what is shown loses spaces before punctuation, what is counted does not."""

import dataclasses
import json
import random

import numpy as np
import pytest
from tokenizers import Tokenizer, models

import kvjax
from kvjax.api.stop_strings import StopStrings
from kvjax.api.streamed_text import Decoding
from kvjax.eval.tasks.reader import reader_of
from kvjax.models.added_tokens import EVEN_BPE
from kvjax.models.clean_spaces import clean_spaces, cleans_spaces, uncleaned
from kvjax.models.tokenizer import read_text
from kvjax.train.data.byte_tokenizer import byte_tokenizer
from tests.models.tokenizer_cases import SHOWN


def read(made, folder, clean=True):
    """Read a tokenizer as it comes from a checkpoint's files, which clean even what a BPE decodes to."""
    made.save(str(folder / "tokenizer.json"))
    settings = {"clean_up_tokenization_spaces": clean, EVEN_BPE: True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return read_text(folder).tokenizer


def speaking():
    """Make a model of bytes, whose text is cleaned."""
    tokenizer = byte_tokenizer()
    clean_spaces(tokenizer)
    return dataclasses.replace(kvjax.load("bytes-tiny"), tokenizer=tokenizer)


@pytest.mark.rotating
@pytest.mark.parametrize("written", SHOWN)
def test_text_is_shown_as_transformers_shows_it(written, tmp_path):
    plain, cleaned = (read(byte_tokenizer(), tmp_path, clean) for clean in (False, True))
    ids = plain.encode(written).ids
    assert cleaned.encode(written).ids == ids and uncleaned(cleaned)(ids) == written
    assert plain.decode(ids) == written and cleaned.decode(ids) == SHOWN[written]


@pytest.mark.parametrize("written", SHOWN)
def test_a_bpe_shows_what_the_model_wrote(written, tmp_path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"clean_up_tokenization_spaces": true}')
    made = read_text(tmp_path).tokenizer
    assert made.decode(made.encode(written).ids) == written


def test_words_without_a_decoder_are_joined_and_cleaned(tmp_path):
    vocab = {"well": 0, ",": 1, "it": 2, "'s": 3}
    made = read(Tokenizer(models.WordLevel(vocab=vocab, unk_token="well")), tmp_path)
    assert made.decode([0, 1, 2, 3]) == "well, it's" and uncleaned(made)([0, 1, 2, 3]) == "well , it 's"


def test_a_saved_tokenizer_cleans_once(tmp_path):
    again = read(read(byte_tokenizer(), tmp_path), tmp_path)
    assert cleans_spaces(again) and again.decode(list(b"a  .")) == "a ."
    assert not cleans_spaces(read(byte_tokenizer(), tmp_path, clean=False))


def test_pieces_of_a_cleaned_text_are_the_text():
    made, generator = speaking().tokenizer, random.Random(0)
    for _ in range(2000):
        ids = generator.choices(b"   .'nntsmver", k=9)
        text = Decoding(made)
        assert "".join([*map(text.add, ids), text.rest()]) == made.decode(ids)


@pytest.mark.rotating
def test_answers_are_read_cleaned_and_bytes_are_counted_as_written():
    model, text = speaking(), "so , it 's . "
    ids = list(text.encode())
    assert reader_of(model).text(ids) == "so, it's. "
    found, plain = (kvjax.likelihood(one, [text]) for one in (model, kvjax.load("bytes-tiny")))
    assert found.bytes == plain.bytes


def test_stop_strings_meet_the_text_as_it_was_written():
    ends = StopStrings(speaking(), [" ."], rows=1)
    assert [bool(ends(np.array([byte]))[0]) for byte in b"a ."] == [False, False, True]
