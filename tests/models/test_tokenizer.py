"""A checkpoint's tokenizer files: the ids that a text becomes, what ends it, and what is refused."""

import json

import pytest
from tokenizers import Tokenizer, models

from kvjax.base.errors import InputError
from kvjax.io.checkpoint import load_checkpoint, save_checkpoint
from kvjax.io.load import load
from kvjax.models.model import Model
from kvjax.models.tokenizer import chat, read_text
from kvjax.train.data.sources import words_of
from kvjax.train.settings import Data
from tests.models.tokenizer_cases import CASES, TEXT, Files, entry, write


@pytest.mark.parametrize("name", CASES)
def test_text_becomes_the_ids_of_transformers(name, tmp_path):
    files = CASES[name]
    assert read_text(write(files, tmp_path)).tokenizer.encode(TEXT).ids == files.ids


def test_training_texts_are_not_cut(tmp_path):
    files = CASES["truncation and padding"]._replace(tokenizer_config={"eos_token": "<s>"})
    made = words_of(Data(tokenizer=str(write(files, tmp_path)))).tokenizer
    assert len(made.encode("hi" * 50).ids) == 100 and len(made.encode("hi").ids) == 2


def test_chats_are_not_cut(tmp_path):
    text = read_text(write(CASES["truncation and padding"], tmp_path))
    given = load("recall-tiny")
    made = Model(
        given.config, given.params, tokenizer=text.tokenizer, chat_template="{{ messages[0].content }}"
    )
    for content, length in (("hi" * 50, 100), ("hi", 2)):
        assert len(chat(made, [{"role": "user", "content": content}])) == length


def test_merges_that_drop_out_are_switched_off(tmp_path):
    vocab = {"a": 0, "b": 1, "ab": 2}
    Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")], dropout=0.99)).save(
        str(tmp_path / "tokenizer.json")
    )
    made = read_text(tmp_path).tokenizer
    assert [made.encode("ab").ids for _ in range(20)] == [[2]] * 20


def test_newest_of_several_tokenizer_files_is_read(tmp_path):
    names = ["tokenizer.json", "tokenizer.4.9.json", "tokenizer.4.10.json"]
    write(Files([], {"fast_tokenizer_files": names}), tmp_path)
    (tmp_path / names[2]).write_text((tmp_path / names[0]).read_text().replace("Ġ", "a2"))
    assert "a2" in read_text(tmp_path).tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("eos", "expected"),
    [
        (3, (3,)), ([3, 2], (2, 3)), ([[3], [2, 3]], (2, 3)), ("<s>", (11,)), (["<s>", 3], (3, 11)),
        (-1, ()), (None, ()),
    ],
)  # fmt: skip
def test_eos_ids_are_read_in_every_form(eos, expected, tmp_path):
    folder = write(Files([]), tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert read_text(folder).stop_ids == expected


@pytest.mark.parametrize("eos", [True, 2.0, "no such token", {"id": 2}, [[None], 2.5]])
@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_eos_id_of_another_kind_is_refused(eos, file, tmp_path):
    folder = write(Files([]), tmp_path)
    (folder / f"{file}.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(InputError, match="eos_token_id in the files of"):
        read_text(folder)


def test_named_token_that_only_the_settings_know_ends_a_text(tmp_path):
    text = read_text(write(Files([], {"eos_token": "<|end|>"}), tmp_path))
    assert text.stop_ids == (12,) and text.special_tokens == {"eos_token": "<|end|>"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"added_tokens_decoder": {"20": entry("<pad>")}}, "give .<pad>. the id 20; .* gets 12"),
        ({"added_tokens_decoder": {"12": {"no": "content"}}}, "added_tokens_decoder of the tokenizer is"),
        ({"added_tokens_decoder": {"12": entry("<x>", lstrip="yes")}}, "describes no token"),
        ({"added_tokens_decoder": {"one": entry("<x>")}}, "has the id 'one'"),
        ({"added_tokens_decoder": [1]}, r"is \[1\], expected an object"),
        ({"eos_token": ["</s>"]}, r"eos_token of the tokenizer is \['</s>'\]"),
        ({"pad_token": 0}, "pad_token of the tokenizer is 0"),
        ({"additional_special_tokens": [3]}, "additional_special_tokens of the tokenizer is 3"),
        ({"chat_template": 5}, "chat_template in .* is 5"),
        ({"chat_template": ["x"]}, "chat_template in"),
        ({"chat_template": {"default": 5}}, "chat_template in .* is 5"),
    ],
)
def test_broken_settings_are_named(settings, says, tmp_path):
    with pytest.raises(InputError, match=says):
        read_text(write(Files([], settings), tmp_path))


def test_added_tokens_survive_saving(tmp_path):
    for name in ("added_tokens_decoder", "split_special_tokens"):
        folder = tmp_path / name
        folder.mkdir()
        text = read_text(write(CASES[name], folder))
        model = load("recall-tiny")
        model = type(model)(model.config, model.params, **text._asdict())
        save_checkpoint(model, tmp_path / f"{name} saved")
        again = load_checkpoint(tmp_path / f"{name} saved")
        assert again.tokenizer.encode(TEXT).ids == CASES[name].ids
        assert again.stop_ids == model.stop_ids
