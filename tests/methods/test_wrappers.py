"""What stands around methods that choose slots; kvpress has the same sets (`test_kvpress.py`)."""

from functools import partial

import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.grammar import Method
from tests.float64.reference import Row
from tests.methods.battery import MAIN, ROOM, kept_of, model, off, positions, prompt_of
from tests.methods.expected import keydiff_score
from tests.methods.rows import WINDOW, count
from tests.methods.table import BY_LABEL
from tests.sweep import sweep

KNORM = dict(budget=0.5, skip_layers=0)


def knorm(**hyper):
    return kvjax.method("l2compress", **KNORM | hyper)


def keydiff():
    return kvjax.method("keydiff", budget=0.5)


@pytest.mark.rotating
def test_every_chunk_of_a_text_keeps_its_share():
    _, cache = kvjax.prefill(model("4/2"), MAIN.first, method=kvjax.in_chunks(keydiff(), 6), room=ROOM)
    for b, row in enumerate(MAIN.first):
        for layer, lists in enumerate(positions(cache)):
            score = keydiff_score(prompt_of("4/2", "main", b), layer)
            for mine, held in zip(score, lists[b], strict=True):
                chunks = [np.arange(at, min(at + 6, len(row))) for at in range(0, len(row), 6)]
                # By the share of their chunk that is no worse; the first chunks have what rounding left.
                share = {j: (r + 1) / len(c) for c in chunks for r, j in enumerate(c[np.argsort(-mine[c])])}
                assert held == set(sorted(share, key=lambda j: (share[j], j))[: len(row) // 2])


@pytest.mark.rotating
def test_lists_come_back_to_their_budget_after_so_many_tokens():
    method = kvjax.while_decoding(knorm(budget=10), every=3)
    _, cache = kvjax.prefill(model("4/2"), MAIN.first, method=method, room=ROOM)
    held = []
    for token in (*MAIN.steps, *MAIN.steps):
        _, cache = kvjax.step(model("4/2"), cache, token)
        held.append({len(s) for layer in positions(cache) for lists in layer for s in lists})
    assert held == [{11}, {12}, {10}, {11}, {12}, {10}]


# By the label of its row, a method that selects at the ends of prompts: its sinks, and its window.
FIRST = {"snapkv": (0, WINDOW), "expected-attention": (4, 0), "laq": (0, 2), "keydiff": (0, 0)}


@pytest.mark.parametrize("label", sweep(FIRST, "snapkv"))
def test_prompts_are_left_by_one_method_and_steps_by_another(label):
    ((id, hyper),) = BY_LABEL[label].build
    method, m = kvjax.chain(kvjax.method(id, **hyper), kvjax.method("tova", budget=0.5)), model("4/2")
    assert method.keep == kvjax.phased(kvjax.method(id, **hyper), kvjax.method("tova", budget=0.5)).keep
    _, cache = kvjax.prefill(m, MAIN.first, method=method, room=ROOM)
    prompts = [prompt_of("4/2", "main", b) for b in range(len(MAIN.first))]
    rows = [Row(prompt, kept_of(label, prompt)) for prompt in prompts]
    assert [[lists[b] for lists in positions(cache)] for b in range(len(rows))] == [
        r.positions() for r in rows
    ]
    for tokens in MAIN.steps:
        logits, cache = kvjax.step(m, cache, tokens)
        for b, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            assert off(logits[b], row.step(token, victim=partial(least_loved, protected=FIRST[label]))) < 3e-5
            assert [lists[b] for lists in positions(cache)] == row.positions()


def least_loved(lists, length, queries, protected):
    """TOVA's choice among slots that the first method does not protect."""
    sinks, window = protected
    if len(lists[0]) <= count(length):
        return [None] * len(lists)
    mean = np.mean([[slot["now"] for slot in slots] for slots in lists], axis=0)
    free = np.array([[sinks <= slot["pos"] < length - window for slot in slots] for slots in lists])
    return [int(np.argmin(np.where(mine, mean, np.inf))) for mine in free]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kvjax.in_chunks(kvjax.method("int8"), 8), "int8 chooses no slots: give a method that does"),
        (lambda: kvjax.in_blocks(knorm(), 0), "tokens is 0, expected a whole number of tokens, at least 1"),
        (lambda: kvjax.merging(knorm(), 2.0), "threshold is 2.0, expected a cosine from 0 to 1"),
        (lambda: kvjax.merging(kvjax.method("d2o", budget=0.5)), "d2o merges by .* already"),
        (lambda: kvjax.while_decoding(knorm(), 0), "every is 0, expected a whole number of tokens"),
        (
            lambda: kvjax.while_decoding(kvjax.method("kvzip", budget=0.5)),
            "kvzip cannot be changed so: evicting while decoding works",
        ),
        (lambda: kvjax.in_chunks(Method(), 8), "full chooses no slots"),
        (
            lambda: kvjax.phased(kvjax.method("h2o", budget=8), knorm()),
            "h2o, then l2compress: the first evicts while decoding, too",
        ),
        (lambda: kvjax.phased(knorm(), knorm()), "the second does not evict after every token"),
        (
            lambda: kvjax.phased(knorm(), kvjax.method("tova", budget=8)),
            r"the budget Budget\(amount=0.5\) and the second Budget\(amount=8\): give both the same",
        ),
        (lambda: kvjax.phased(Method(), knorm()), "full chooses no slots"),
    ],
)
def test_what_cannot_be_changed_so_says_why(make, message):
    with pytest.raises(InputError, match=message):
        make()
