"""A tokenizer whose ids are the 256 bytes and an end-of-text token."""

from __future__ import annotations

import itertools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"
VOCAB = 257


def byte_tokenizer() -> Tokenizer:
    """Text to the bytes of its UTF-8 form and back, as the tokenizers library writes them.

    >>> tokenizer = byte_tokenizer()
    >>> tokenizer.encode("né").ids, tokenizer.decode([110, 195, 169])
    ([110, 195, 169], 'né')
    """
    vocab = {letter: byte for byte, letter in enumerate(_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer


def _letters() -> list[str]:
    """Return the characters that byte-level tokenizers write for the 256 bytes: themselves if printable."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
