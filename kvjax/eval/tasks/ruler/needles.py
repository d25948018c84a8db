"""Needles in a haystack: numbers or uuids by key, hidden in noise, in a text, or among other needles.

Source: NVIDIA/RULER at c3f5e3b, scripts/data/synthetic/niah.py, and synthetic.yaml for the settings of the
tasks.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvjax.eval.tasks.ruler.prompts import PROMPTS, Draft, draft, joined, of_one
from kvjax.eval.tasks.ruler.shipped import NOISE, Haystack, sentences, words_of

NEEDLE = "One of the special magic {type} for {key} is: {value}."
# Depths, in percent, at which needles may be in a text.
DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int)


class Needles(NamedTuple):
    """A needle task: its haystack, its keys and values, and how many of them there are.

    The haystack is "noise", "essay" or "needle"; keys and values are "words", "numbers" or "uuids". Then come
    the number of keys, of values per key, and of keys that are asked for.
    """

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_asked: int = 1


NEEDLES: Mapping[str, Needles] = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", values="uuids"),
    "niah_multikey_1": Needles("essay", num_keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Needles("essay", num_values=4),
    "niah_multiquery": Needles("essay", num_keys=4, num_asked=4),
}


def draw_needles(task: Needles, text: Haystack | None, rng: np.random.Generator, size: int) -> Draft:
    """Draw a sample whose haystack has `size` noise passages, words or needles; all keys in it differ."""
    taken: set[str] = set()
    keys = [_new(task.keys, rng, taken) for _ in range(task.num_keys)]
    pairs = [(key, _new(task.values, rng, taken)) for key in keys for _ in range(task.num_values)]
    asked = [keys[i] for i in rng.permutation(task.num_keys)[: task.num_asked]]
    answers = [value for key in asked for k, value in pairs if k == key]
    needles = [
        (NEEDLE.format(type=task.values, key=key, value=value), key in asked)
        for key, value in (pairs[i] for i in rng.permutation(len(pairs)))
    ]
    if task.haystack == "essay":
        assert text is not None
        context = _in_text(sentences(text.first(size)), needles, rng)
    else:
        around = [NOISE] * size
        if task.haystack == "needle":
            around = [
                NEEDLE.format(
                    type=task.values, key=_new(task.keys, rng, taken), value=_new(task.values, rng, taken)
                )
                for _ in range(size)
            ]
        context = _between(around, needles, rng)
    one = len(answers) == 1
    prompt = of_one(PROMPTS["niah"]) if one else PROMPTS["niah"]
    kind = task.values[:-1] if one else task.values
    return draft(prompt, context, tuple(answers), type=kind, query=listed(asked))


def listed(keys: list[str]) -> str:
    """Keys in the form of a question.

    >>> listed(["a"]), listed(["a", "b"])
    ('a', 'a, and b')
    """
    return keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + ", and " + keys[-1]


def _in_text(text: list[str], needles: list[tuple[str, bool]], rng: np.random.Generator) -> tuple[str, ...]:
    """Needles between the sentences of a text, each at another depth."""
    depths = sorted(rng.choice(DEPTHS, len(needles), replace=False).tolist())
    places = [0, *(int(len(text) * (depth / 100)) for depth in depths), len(text)]
    parts: list[tuple[str, bool]] = []
    for i, (start, end) in enumerate(zip(places, places[1:], strict=False)):
        parts += [(" ".join(text[start:end]), False), *needles[i : i + 1]]
    return joined(parts, " ")


def _between(around: list[str], needles: list[tuple[str, bool]], rng: np.random.Generator) -> tuple[str, ...]:
    """Needles in front of lines, at most one of each."""
    parts = [(line, False) for line in around]
    places = sorted(rng.choice(len(around), len(needles), replace=False).tolist(), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        parts.insert(place, needle)
    return joined(parts, "\n")


def _new(kind: str, rng: np.random.Generator, taken: set[str]) -> str:
    """Draw a new word, number of seven digits, or uuid, which is then added to `taken`."""
    while (found := _drawn(kind, rng)) in taken:
        pass
    taken.add(found)
    return found


def _drawn(kind: str, rng: np.random.Generator) -> str:
    if kind == "numbers":
        return str(rng.integers(10**6, 10**7))
    if kind == "uuids":
        return str(uuid.UUID(bytes=rng.bytes(16), version=4))
    first, second = words_of("adjective"), words_of("noun")
    return f"{first[rng.integers(len(first))]}-{second[rng.integers(len(second))]}"
