"""Counting words: the common words of a numbered list (cwe), the frequent words of a coded text (fwe).

Source: NVIDIA/RULER at c3f5e3b, common_words_extraction.py and freq_words_extraction.py under
scripts/data/synthetic.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import zeta

from kvjax.eval.tasks.ruler.prompts import PROMPTS, Draft, draft, joined, text_of
from kvjax.eval.tasks.ruler.shipped import words_of

COMMON = 10
# Prompts below so many tokens have lists that repeat their words less often.
SHORT = 4096
_ALPHA, _CODED_LETTERS, _DOTS = 2.0, 6, "..."


class Repeats(NamedTuple):
    """How often common and other words occur in the list, and in the solved example of `words` words."""

    common: int
    other: int
    words: int
    example_common: int
    example_other: int


def repeats(length: int) -> Repeats:
    return Repeats(6, 1, 20, 3, 1) if length < SHORT else Repeats(30, 3, 40, 10, 3)


def draw_list(rng: np.random.Generator, size: int, length: int) -> Draft:
    """Draw a list of `size` different words, 10 of them common, after a solved example.

    Deviation: if wonderwords has too few words, RULER uses a second word list; here lists have at most as
    many words as wonderwords.
    """
    often = repeats(length)
    example = _list(rng, often.words, often.example_common, often.example_other)
    solved = f"{text_of(example)} {numbered(example.references)}\n"
    return _list(rng, size, often.common, often.other, solved)


def _list(rng: np.random.Generator, size: int, common: int, other: int, before: str = "") -> Draft:
    words = words_of("all")
    drawn = [words[i] for i in rng.choice(len(words), size, replace=False)]
    entries = drawn[:COMMON] * common + drawn[COMMON:] * other
    shuffled = [entries[i] for i in rng.permutation(len(entries))]
    often = set(drawn[:COMMON])
    parts = [(f"{i}. {word}", word in often) for i, word in enumerate(shuffled, 1)]
    return draft(PROMPTS["cwe"], joined(parts, " "), tuple(drawn[:COMMON]), before=before)


def numbered(words: Sequence[str]) -> str:
    """Write a numbered list on one line.

    >>> numbered(["one", "two"])
    '1. one 2. two'
    """
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def coded_counts(words: int, vocabulary: int) -> list[int]:
    """How often coded words occur in a text of `words`, by rank: n / (rank^2 zeta(2)), rounded down.

    >>> coded_counts(100, 5)
    [60, 15, 6, 3, 2]
    """
    ranks = np.arange(1, vocabulary + 1)
    return (words * ranks**-_ALPHA / zeta(_ALPHA)).astype(int).tolist()


def text_words(size: int, tokens: int) -> int:
    """Return the size-th number of words that RULER tries for a prompt of so many tokens."""
    step = max(tokens // 32, 1)
    return tokens // _CODED_LETTERS % step + size * step


def draw_coded(rng: np.random.Generator, size: int, tokens: int) -> Draft:
    """Draw a coded text of `text_words(size, tokens)` words, mostly dots; ask for the next three words."""
    vocabulary = max(tokens // 50, 5)
    words = [_DOTS]
    while len(words) < vocabulary:
        word = "".join(string.ascii_lowercase[i] for i in rng.integers(26, size=_CODED_LETTERS))
        words += [word] * (word not in words)
    counts = coded_counts(text_words(size, tokens), vocabulary)
    text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    answers = tuple(words[1:4])
    parts = [(text[i], text[i] in answers) for i in rng.permutation(len(text))]
    return draft(PROMPTS["fwe"], joined(parts, " "), answers)


def fewest_coded(tokens: int) -> int:
    """Find the smallest size at which the asked words are more frequent than all others."""
    size = 0
    while True:
        counts = coded_counts(text_words(size, tokens), 5)
        if counts[3] > counts[4]:
            return size
        size += 1
