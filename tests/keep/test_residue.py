"""LESS's residue under other keeps than H2O's: at the end of prompts alone, in pages, every few steps."""

import numpy as np
import pytest

import kvjax
from kvjax.grammar import Budget, Keep
from kvjax.grammar.when import PREFILL_END, Every
from kvjax.keep.budgets.budget import AcrossHeads, Uniform
from kvjax.keep.merges.residue import Residue
from kvjax.keep.scores.score import KeyNorm, Position
from tests.float64.merges import Less
from tests.float64.reference import Row
from tests.methods.battery import MAIN, ROOM, model, off, positions, prompt_of
from tests.methods.expected import KERNELS
from tests.methods.rows import PAGE, THETA, count
from tests.sweep import sweep

LESS = Less(KERNELS.arrays, THETA)


def oldest(lists, length, queries):
    """Of lists two beyond their budget, the oldest slots leave."""
    order = [np.argsort([slot["pos"] for slot in slots]) for slots in lists]
    return [x[: len(x) - count(length)] if len(x) >= count(length) + 2 else None for x in order]


def sentence(score, allocate, when):
    return kvjax.chain(Keep(score, Budget(0.5), allocate, when=when, merge=Residue(KERNELS), page=PAGE))


CASES = {
    "prompts": (sentence(KeyNorm(), Uniform(), PREFILL_END), None),
    "pages": (sentence(KeyNorm(), AcrossHeads(0.0), PREFILL_END), None),
    "every second token": (sentence(Position(), Uniform(), Every(2)), oldest),
}


@pytest.mark.parametrize("name", sweep(CASES, "every second token"))
def test_queries_ask_what_has_left_whenever_it_left_and_wherever_the_rest_lies(name):
    method, victim = CASES[name]
    m = model("4/2")
    logits, cache = kvjax.prefill(m, MAIN.first, method=method, room=ROOM)
    rows = []
    for b, lists in enumerate(zip(*positions(cache), strict=True)):
        prompt = prompt_of("4/2", "main", b)
        kept = [np.stack([np.isin(np.arange(prompt.length), list(x)) for x in layer]) for layer in lists]
        rows.append(Row(prompt, kept, leave=LESS))
    for token in MAIN.steps:
        logits, cache = kvjax.step(m, cache, token)
        want = [row.step(t, victim=victim) for row, t in zip(rows, token, strict=True)]
        assert off(logits, np.stack(want)) < 3e-5
    for b, row in enumerate(rows):
        assert [lists[b] for lists in positions(cache)] == row.positions()
    logits, _ = kvjax.prefill(m, MAIN.second, cache=cache, method=method, compress=False)
    want = [[row.step(t) for t in tokens][-1] for row, tokens in zip(rows, MAIN.second, strict=True)]
    assert off(logits, np.stack(want)) < 3e-5
