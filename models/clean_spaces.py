"""Removes spaces before punctuation, for checkpoints with `clean_up_tokenization_spaces`.

The cleaning is made for WordPiece, whose tokens do not include spaces; the tokens of a BPE do, and cleaning
would remove spaces that the model generated. The tokenizer's decoder does it, so everything that decodes with
the tokenizer shows what transformers shows, and a saved tokenizer.json keeps doing it. Code that counts or
compares generated text uses `uncleaned`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders

# In the order of transformers 5.2.0, `_decode` in tokenization_utils_tokenizers.py.
_REPLACED = [(" " + text, text) for text in (".", "?", "!", ",")]
_REPLACED += [(" ' ", "'")] + [(" " + text, text) for text in ("n't", "'m", "'s", "'ve", "'re")]
# No token contains this prefix, so the decoder joins tokens by spaces, as `tokenizers` does without a
# decoder.
_NO_PREFIX = "\0" * 8
# A match begins with a space and has at most three more characters. " ' " may form one with the text before
# it (" n ' t" is "n't"), and its last space may begin " .", which is replaced first.
_OPEN = re.compile(r"(( +[^ ]{0,2}){1,2}|')$")


def clean_spaces(tokenizer: Tokenizer) -> None:
    """Make the tokenizer decode to cleaned text: "a , b" becomes "a, b"; ids are unchanged."""
    if not cleans_spaces(tokenizer):
        first = tokenizer.decoder or decoders.WordPiece(prefix=_NO_PREFIX, cleanup=False)
        steps = [first, decoders.Fuse(), *(decoders.Replace(old, new) for old, new in _REPLACED)]
        tokenizer.decoder = decoders.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]


def cleans_spaces(tokenizer: Any) -> bool:
    """Whether `clean_spaces` has changed a tokenizer's decoder."""
    return _first_step(tokenizer) is not None


def uncleaned(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Make a function that decodes ids to the text as it was generated, with special tokens and spaces."""
    if (first := _first_step(tokenizer)) is None:
        return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)
    decoder = decoders.Sequence([])
    decoder.__setstate__(json.dumps({"type": "Sequence", "decoders": [first]}).encode())

    def decode(ids: Sequence[int]) -> str:
        tokens = (tokenizer.id_to_token(i) for i in ids)
        return decoder.decode([token for token in tokens if token is not None])

    return decode


def settled(text: str) -> str:
    """Return the part of a cleaned text that further text does not change."""
    return _OPEN.sub("", text)


def _first_step(tokenizer: Any) -> Any:
    """Find the decoder that was there before `clean_spaces`, as JSON; None if nothing is cleaned."""
    if not isinstance(tokenizer, Tokenizer) or tokenizer.decoder is None:
        return None
    steps = json.loads(tokenizer.decoder.__getstate__()).get("decoders", [])
    found = [(step["pattern"].get("String"), step["content"]) for step in steps[2:] if "pattern" in step]
    return steps[0] if found == _REPLACED else None
