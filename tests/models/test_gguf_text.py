"""Tokenizers of GGUF files: ids as the published tokenizers give them."""

import itertools
import json
from pathlib import Path

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kvjax.base.errors import InputError
from kvjax.models.gguf.pre_tokenizers import SPLITS, pre_tokenizer
from kvjax.models.gguf.reader import open_gguf
from kvjax.models.gguf.text import text_of

FIXTURES = Path(__file__).parents[1] / "fixtures" / "gguf"
PAGE = """# Notes, 2024-05-17
def mean(xs: list[float]) -> float:
    total = 0.0
\tfor i, x in enumerate(xs):  # don't, we'll, I'M, they've
        total += x * 1_000_000 / 3.14159e-10


   Trailing spaces   \r\n\r\nIt is 12345678 metres.
价格是 1,234.56 元。你好，世界！日本語のテキストと한국어 텍스트.
Emoji: 🎉👩‍👩‍👧‍👦🇩🇪 👍🏽 → ∑ ½ ² Ⅷ ٣٤ १२
naïve cafe\u0301 Ærøskøbing ﬁne İstanbul Straße HelloWorld camelCase's
<html>&nbsp;</html> {"key": [1, 2, null]} $x^2 + y_{10}$ \\alpha <|im_end|>
"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_2 = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"""
    r"""|\s+(?!\S)|\s+"""
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
# As their tokenizer.json have them: with the library's own words where these exist.
PUBLISHED = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN_2), "isolated"), BYTES]),
    "llama-bpe": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(QWEN_2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), "isolated"), BYTES]
    ),
}


def trained(name):
    """Train a byte-level tokenizer that learned its merges on the page, split as a published one splits."""
    made = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    if name == "qwen2":
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = PUBLISHED[name]
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([PAGE], trainer)
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return made


def write_text(path, tokens, model="gpt2", arch="llama", **keys):
    """Write a GGUF file of a tokenizer alone; keys: of `tokenizer.ggml`."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    for key, value in keys.items():
        name = f"tokenizer.ggml.{key}" if key != "chat_template" else "tokenizer.chat_template"
        writer.add_key_value(name, value, *_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(path)


def _type(value):
    kinds = {
        bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, str: gguf.GGUFValueType.STRING,
        float: gguf.GGUFValueType.FLOAT32,
    }  # fmt: skip
    if isinstance(value, list):
        inner = kinds[type(value[0])]
        return gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32 if type(value[0]) is int else inner
    return (kinds[type(value)],)


def byte_level(path, made, pre, **keys):
    """Write the file of a byte-level tokenizer, its special tokens for control."""
    state = json.loads(made.to_str())["model"]
    size = made.get_vocab_size()
    tokens = [made.id_to_token(i) for i in range(size)]
    merges = [" ".join(pair) for pair in state["merges"]]
    kinds = [3 if token in SPECIAL else 1 for token in tokens]
    return write_text(path, tokens, pre=pre, merges=merges, token_type=kinds, **keys)


@pytest.mark.parametrize("name", PUBLISHED)
def test_byte_level_ids_are_those_of_the_published_tokenizer(name, tmp_path):
    made = trained(name)
    found = text_of(byte_level(tmp_path / "a.gguf", made, name, add_bos_token=False)).tokenizer
    assert found.encode(PAGE).ids == made.encode(PAGE).ids
    assert found.decode(found.encode(PAGE).ids) == made.decode(made.encode(PAGE).ids)
    assert found.encode("<|im_end|>").ids == [made.token_to_id("<|im_end|>")]


def test_ids_of_a_gemma_4_file_are_those_of_its_published_form(tmp_path):
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    fixed = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=fixed, show_progress=False)
    made.train_from_iterator([PAGE], trainer)
    tokens = [made.id_to_token(i) for i in range(made.get_vocab_size())]
    merges = [" ".join(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
    keys = dict(token_type=[1] * len(tokens), bos_token_id=2, unknown_token_id=3)
    found = text_of(write_text(tmp_path / "a.gguf", tokens, "gemma4", merges=merges, **keys)).tokenizer
    for text in (PAGE, "an unseen sign: \U0001f9ff\n\n twice  spaced"):
        assert found.encode(text).ids == [2, *made.encode(text).ids]
        assert found.decode(found.encode(text).ids[1:]) == text


# Pieces of a text, by the name of what splits it.
PIECES = {
    "default": ("a1234 x!?b", ["a", "123", "4", "Ġx", "!?", "b"]),
    "falcon": ("a1234 (b)", ["a", "123", "4", "Ġ", "(", "b", ")"]),
    "tekken": ("HelloWorld's 12", ["Hello", "World", "'s", "Ġ", "1", "2"]),
    "gpt-4o": ("HelloWorld's 1234", ["Hello", "World's", "Ġ", "123", "4"]),
    "dbrx": ("it's 12345", ["it", "'s", "Ġ", "123", "45"]),
    "deepseek-v3": ("x=12345年", ["x", "=", "123", "45", "å¹´"]),
    "deepseek-coder": ("a b!1\n2", ["a", "Ġb", "!", "1", "Ċ", "2"]),
    "stablelm2": ("a12", ["a", "1", "2"]),
    "qwen35": ("e\u0301t\u00e9 12", ["e\u00cc\u0123t\u00c3\u00a9", "\u0120", "1", "2"]),
    "seed-coder": ("it's 12!\n", ["it", "'s", "\u0120", "1", "2", "!", "\u010a"]),
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces_are_split_by_name(name):
    text, pieces = PIECES[name]
    assert [piece for piece, _ in pre_tokenizer(SPLITS[name]).pre_tokenize_str(text)] == pieces


def test_special_tokens_stops_and_template_come_from_the_file(tmp_path):
    made = trained("smollm")
    end, start, empty = (made.token_to_id(f"<|{name}|>") for name in ("im_end", "im_start", "endoftext"))
    keys = dict(bos_token_id=start, eos_token_id=empty, add_bos_token=True, add_eos_token=True)
    text = text_of(byte_level(tmp_path / "a.gguf", made, "smollm", chat_template="{{ x }}", **keys))
    assert text.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}
    assert text.chat_template == "{{ x }}"
    # <|im_end|> ends a turn, though no key names it.
    assert text.stop_ids == tuple(sorted((end, empty)))
    assert text.tokenizer.encode("a").ids == [start, made.token_to_id("a"), empty]
    assert text.tokenizer.encode("a", add_special_tokens=False).ids == [made.token_to_id("a")]
    assert text.tokenizer.decode([start, made.token_to_id("a")]) == "a"


# --- SentencePiece -----------------------------------------------------------------------------------


def greedy_by_score(text, pieces, scores):
    """SentencePiece's BPE: join the neighbours whose piece scores highest, of equals the leftmost."""
    ids = {piece: i for i, piece in enumerate(pieces)}
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (scores[ids[a + b]], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ids
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    out = []
    for part in parts:
        out += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return out


def sentence_pieces():
    """Unknown, start and end, bytes, pieces, letters, as a trained model has them."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3] + [6] * 256
    words = [
        "he",
        "er",
        "th",
        "▁t",
        "▁the",
        "re",
        "▁th",
        "her",
        "lo",
        "▁he",
        "ere",
        "hel",
        "hello",
        "ll",
        "  ",
    ]
    letters = sorted(set("▁thehellorwd12.,"))
    scores = [0.0] * 259 + [-float(i) for i in range(len(words) + len(letters))]
    return [*pieces, *words, *letters], [*kinds, *[1] * (len(words) - 1), 4, *[1] * len(letters)], scores


@pytest.mark.parametrize("text", ["the there hello", "hello, 12 é🎉 the.", "", " the", "herhellthere"])
def test_sentence_piece_ids_follow_from_scores(text, tmp_path):
    pieces, kinds, scores = sentence_pieces()
    keys = dict(scores=scores, token_type=kinds, unknown_token_id=0, bos_token_id=1, eos_token_id=2)
    found = text_of(write_text(tmp_path / "a.gguf", pieces, "llama", **keys)).tokenizer
    expected = greedy_by_score(text, pieces, scores) if text else []
    assert found.encode(text).ids == [1, *expected]
    assert found.decode(found.encode(text).ids) == text


def test_sentence_piece_ids_are_those_of_the_library(tmp_path):
    record = json.loads((FIXTURES / "sentencepiece.json").read_text(encoding="utf-8"))
    keys = dict(scores=record["scores"], token_type=record["kinds"], unknown_token_id=0, add_bos_token=False)
    found = text_of(write_text(tmp_path / "a.gguf", record["pieces"], "llama", **keys)).tokenizer
    assert [found.encode(text).ids for text in record["texts"]] == record["ids"]
    assert [found.decode(ids) for ids in record["ids"]] == record["texts"]


def test_sentence_piece_matches_tokens_of_the_user_first(tmp_path):
    pieces, kinds, scores = sentence_pieces()
    keys = dict(scores=scores, token_type=kinds, add_bos_token=False, add_space_prefix=False)
    found = text_of(write_text(tmp_path / "a.gguf", pieces, "llama", **keys)).tokenizer
    assert found.encode("he  he</s>").tokens == ["he", "  ", "he", "</s>"]


# --- what is wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "keys", "message"),
    [
        ("bert", {}, "a tokenizer of the kind 'bert', expected one of gpt2, llama, gemma4 or none"),
        (
            "gpt2",
            {"pre": "kimi-k2"},
            "the pre-tokenizer 'kimi-k2', expected one that is read: default, gpt-2",
        ),
        ("gpt2", {"merges": ["a b c"]}, "merges 'a b c', expected two texts with a space between"),
        ("gpt2", {"merges": ["x y"]}, "merges that do not fit its tokens"),
        ("gpt2", {"token_type": [1]}, "token_type of another length than its 2 tokens"),
        ("gpt2", {"eos_token_id": 7}, "eos_token_id = 7, expected one of its 2 tokens"),
        ("llama", {}, "a SentencePiece tokenizer without tokenizer.ggml.scores"),
    ],
)
def test_a_wrong_tokenizer_is_one_sentence(model, keys, message, tmp_path):
    file = write_text(tmp_path / "a.gguf", ["a", "b"], model, **keys)
    with pytest.raises(InputError, match=message):
        text_of(file)
