"""`kvjax generate` prints whole characters as they come, loses none, and escapes what acts on a terminal."""

import random

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

import kvjax
from kvjax.commands.generate_stream import Clock, Decoding, Printer
from kvjax.commands.main import main
from kvjax.train.data.byte_tokenizer import byte_tokenizer

# Bytes of characters of two to four bytes, and bytes that begin none.
_BYTES = [*"é€😀".encode(), 0x80, 0xFF, 0xE2, 65, 32]


def with_byte_fallback():
    """As Llama's: words, and bytes for what is no word."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"▁a": 256, "b": 257, "é": 258}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    strips = decoders.Strip(content=" ", left=1)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strips]
    )
    return made


def draws(vocab, count=300):
    generator = random.Random(0)
    ids = [*_BYTES, vocab - 1, vocab - 2, vocab - 3]
    return [[generator.choice(ids) for _ in range(12)] for _ in range(count)]


def test_pieces_of_a_byte_level_text_are_the_text_and_end_in_whole_characters():
    made = byte_tokenizer()
    for ids in draws(made.get_vocab_size()):
        text = Decoding(made)
        pieces = [text.add(i) for i in ids]
        assert not any(piece.endswith("\ufffd") for piece in pieces)
        assert "".join(pieces) + text.rest() == made.decode(ids)


def test_text_that_a_decoder_reads_otherwise_later_goes_on():
    """Byte fallback makes a whole run of bytes unreadable where one is: DecodeStream raises there."""
    made, changed = with_byte_fallback(), 0
    for ids in draws(made.get_vocab_size()):
        text = Decoding(made)
        shown = "".join([*map(text.add, ids), text.rest()])
        changed += shown != made.decode(ids)
        assert shown.endswith(made.decode(ids)[-1:])
    assert 0 < changed < 300


def test_ends_that_the_decoder_holds_are_printed_and_escapes_are_written_out(capsys):
    model = kvjax.load("bytes-tiny")
    with Clock() as clock:
        printer = Printer(model, clock)
        for i, byte in enumerate(b"a\x1b]0;t\x07\n\t\xc2\x9b\xe2\x82"):
            printer(i, np.array([byte]))
        printer.finish()
    assert capsys.readouterr().out == "a\\x1b]0;t\\x07\n\t\\x9b\ufffd\n"


@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_half_a_character_in_a_prompt_is_named(chat, capsys):
    assert main(["generate", "--model", "bytes-tiny", "--prompt", "a\udce9", *chat]) == 2
    said = capsys.readouterr().err
    assert ("has half a character (\\udce9) at 1" in said) != ("no chat template" in said)


PROMPT = "<bos> the <set> brave otter 17 4 52 <.> a hill <get> brave otter"


@pytest.mark.rotating
@pytest.mark.parametrize(
    "draft",
    ["lookup", *(pytest.param(d, marks=pytest.mark.rotating) for d in ("int8", "recall-tiny"))],
)
def test_a_draft_changes_no_word_of_the_text_and_its_share_is_said(draft, capsys):
    asked = ["generate", "--max-new-tokens", "6", "--prompt", PROMPT]
    assert main(asked) == 0
    plain = capsys.readouterr().out
    assert main([*asked, "--draft", draft, "--drafted", "2"]) == 0
    shown = capsys.readouterr()
    assert shown.out == plain
    assert "drafted tokens taken, in" in shown.err


@pytest.mark.parametrize(
    "given, told",
    [
        (
            ["--draft", "nothing"],
            "expected lookup, first-codes, fewer-slots:METHOD, a method or a model: unknown method",
        ),
        (["--draft", "lookupp"], "a method or a model: did you mean lookup?"),
        (["--draft", "int8", "--stop", "x"], "--draft was given with --stop, expected one of both"),
        (["--drafted", "3"], "--drafted was given without --draft, expected both"),
    ],
)
def test_drafts_that_mean_nothing_are_one_line(given, told, capsys):
    assert main(["generate", "--prompt", PROMPT, *given]) == 2
    assert told in capsys.readouterr().err
