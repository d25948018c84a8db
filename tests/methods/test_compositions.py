"""Words of several papers in one sentence: which slots stay, and what steps answer, against float64 numpy."""

import dataclasses

import pytest

import kvjax
from kvjax.grammar import Method
from kvjax.keep.merges.merge_d2o import SimilarMerge
from tests.float64 import merges
from tests.float64.reference import Row as Slotwise
from tests.methods.battery import MAIN, ROOM, B, kept_of, model, off, positions, prompt_of, step
from tests.methods.rows import THETA
from tests.methods.table import BY_LABEL


def rkv_with_merge():
    """R-KV evicts, a few tokens at a time; D2O's merge takes up what leaves."""
    made = BY_LABEL["r-kv"].method()
    return Method(dataclasses.replace(made.keep, merge=SimilarMerge()))


# The row of the table that says which slots stay and leave, the sentence, what leaving does, and the error.
CASES = {
    "r-kv with merge": ("r-kv", rkv_with_merge, merges.d2o(THETA), 3e-5),
    "duoattention + int8": (
        "duoattention",
        lambda: kvjax.chain(BY_LABEL["duoattention"].method(), kvjax.method("int8")),
        None,
        0.02,
    ),
    # MiKV keeps everything, and here layers differ in how many tokens have all their bits.
    "mikv over cake": (
        "mikv",
        lambda: kvjax.tiered(kvjax.chain(BY_LABEL["cake"].method(), kvjax.method("int8")), bits=4, group=8),
        None,
        0.3,
    ),
}


@pytest.mark.rotating
@pytest.mark.parametrize("name", CASES)
def test_a_conversation_is_that_of_its_words(name):
    label, made, leave, error = CASES[name]
    row = BY_LABEL[label]
    m, method = model(row.model), made()
    _, cache = kvjax.prefill(m, MAIN.first, method=method, room=ROOM)
    asked, _ = step(m, cache, [tokens[-1] for tokens in MAIN.first], append=False)
    slots = []
    for b, tokens in enumerate(MAIN.first):
        prompt = prompt_of(row.model, "main", b)
        slots.append(Slotwise(prompt, kept_of(label, prompt), row.phase, leave))
        assert [lists[b] for lists in positions(cache)] == slots[b].positions()
        assert off(asked[b], slots[b].step(tokens[-1], append=False)) < error
    for token in MAIN.steps:
        logits, cache = step(m, cache, token, append=True)
        for b in range(B):
            assert off(logits[b], slots[b].step(token[b], victim=row.victim)) < error
            assert [lists[b] for lists in positions(cache)] == slots[b].positions()
    if leave is not None:
        # Some that left were merged, and some dropped.
        assert all(sum(memory.get(kind, 0) for s in slots for memory in s.memory) for kind in (True, False))
