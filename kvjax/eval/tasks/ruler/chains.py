"""Variable tracking: a chain of assignments in noise; the question asks for all names in it.

Source: NVIDIA/RULER at c3f5e3b, scripts/data/synthetic/variable_tracking.py.
"""

from __future__ import annotations

import string
from collections.abc import Callable

import numpy as np

from kvjax.eval.tasks.ruler.prompts import PROMPTS, Draft, draft, joined, text_of
from kvjax.eval.tasks.ruler.shipped import NOISE
from kvjax.eval.tasks.ruler.sizes import largest

HOPS = 4
# The solved example takes so many tokens, whatever the length.
EXAMPLE_TOKENS = 500
_LETTERS, _EXAMPLE_LETTERS = 5, 3


def draw_chain(rng: np.random.Generator, size: int, example_size: int) -> Draft:
    """Draw a chain in `size` noise passages, after a solved example of `example_size`."""
    example = _chain(rng, example_size, _EXAMPLE_LETTERS)
    solved = f"{text_of(example)} {' '.join(example.references)}\n\n"
    return _chain(rng, size, _LETTERS, solved)


def example_size(tokens: Callable[[str], int]) -> int:
    """How many noise passages the solved example has: as many as fit into its tokens, or the fewest."""

    def fits(size: int) -> bool:
        return tokens(text_of(_chain(np.random.default_rng(0), size, _EXAMPLE_LETTERS))) <= EXAMPLE_TOKENS

    return largest(fits, HOPS + 1, EXAMPLE_TOKENS, HOPS + 5) or HOPS + 1


def _chain(rng: np.random.Generator, size: int, letters: int, before: str = "") -> Draft:
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(string.ascii_uppercase[i] for i in rng.integers(26, size=letters))
        names += [name] * (name not in names)
    value = str(rng.integers(10000, 99999))
    lines = [f"VAR {names[0]} = {value}"]
    lines += [f"VAR {new} = VAR {old} " for old, new in zip(names, names[1:], strict=False)]
    parts = [(NOISE, False)] * size
    places = np.sort(rng.choice(size, len(lines), replace=False))
    for i, (place, line) in enumerate(zip(places.tolist(), lines, strict=True)):
        parts.insert(place + i, (line, True))
    context = joined(parts, "\n")
    return draft(PROMPTS["vt"], context, tuple(names), before=before, query=value, count=str(len(names)))
