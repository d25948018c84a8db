"""The model's tokenizer in the form that suites use: texts to ids, piece by piece, and ids to words."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from kvjax.base.checks import check_text
from kvjax.base.errors import InputError
from kvjax.eval.tasks import recall
from kvjax.models.model import Model


class SuiteTokenizer(NamedTuple):
    """A tokenizer as suites use it: special tokens are not added; those that open a text are `bos`."""

    tokenizer: Tokenizer
    name: str
    bos: tuple[int, ...]

    def split(self, *pieces: str) -> list[tuple[int, ...]]:
        """Ids of each piece of a text, tokenised as one; a token over a border belongs to what follows."""
        check_text("".join(pieces))
        try:
            found = self.tokenizer.encode("".join(pieces), add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise self._cannot_read("".join(pieces), error) from error
        starts, ends = np.array(found.offsets, np.int64).reshape(-1, 2).T
        borders = np.cumsum([len(piece) for piece in pieces])[:-1]
        cuts = np.minimum(np.searchsorted(starts, borders, "left"), np.searchsorted(ends, borders, "right"))
        ids = found.ids
        return [tuple(ids[a:b]) for a, b in itertools.pairwise([0, *cuts.tolist(), len(ids)])]

    def after(self, *pieces: str) -> list[tuple[int, ...]]:
        """`split` of pieces that follow a full stop, as they do in a context."""
        return self.split(".", *pieces)[1:]

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def words(self, ids: Sequence[int]) -> list[str]:
        """Decode the text of each token, with its own white space."""
        return [self._word(i) for i in ids]

    def _word(self, id: int) -> str:
        token = self.tokenizer.id_to_token(id) or ""
        if token.startswith("\u2581"):
            # SentencePiece's decoder drops the space before a text's first word, which each token is here.
            return token.replace("\u2581", " ")
        return self.tokenizer.decode([id], skip_special_tokens=False) or token

    def reads(self, word: str) -> bool:
        """Whether a word is decoded unchanged from its tokens: none is unknown, and nothing is dropped."""
        try:
            ids = self.tokenizer.encode(word, add_special_tokens=False).ids
        except Exception:
            return False
        return word.lower() in self.text(ids).lower().replace(" ", "")

    def _cannot_read(self, text: str, error: Exception) -> InputError:
        words = (w for w in text.split() if not self.reads(w))
        what = next((f"knows no word {w!r}" for w in words), f"failed ({error})")
        return InputError(f"the tokenizer of {self.name} {what}: expected a text in the model's own words")


def joiner_of(words: Sequence[str]) -> str:
    """Return the separator between words; pieces of a tokenizer have their own white space.

    >>> joiner_of(["a", "b"]), joiner_of(["a", " b"])
    (' ', '')
    """
    return "" if any(word[:1].isspace() for word in words) else " "


def reader_of(model: Model) -> SuiteTokenizer:
    """Return the model's tokenizer, without truncation or padding; InputError if it has none.

    >>> from kvjax.io.load import load
    >>> reader_of(load("recall-tiny")).split("<get> brave", " otter")
    [(3, 12), (64,)]
    """
    tokenizer = recall.tokenizer() if speaks_recall(model) else model.tokenizer
    if tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer.json, expected one beside its weights: put it there")
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    plain.encode_special_tokens = tokenizer.encode_special_tokens
    empty = plain.encode("")
    first = model.special_tokens.get("bos_token")
    opens = plain.token_to_id(first) if first else None
    bos = itertools.takewhile(
        lambda pair: pair[1] and (pair[0] == opens or pair[0] not in model.stop_ids),
        zip(empty.ids, empty.special_tokens_mask, strict=True),
    )
    return SuiteTokenizer(plain, model.name, tuple(i for i, _ in bos))


def speaks_recall(model: Model) -> bool:
    """Whether a model's tokens are the words of the recall language, even if it has no tokenizer."""
    if model.config.vocab != recall.VOCAB:
        return False
    return model.tokenizer is None or model.tokenizer.token_to_id(recall.WORDS[-1]) == recall.VOCAB - 1
