"""Slots that the token before selected, beside a copy of all others in few bits, against float64 numpy."""

from functools import cache

import numpy as np
import pytest

import kvjax
from kvjax.grammar import Budget
from kvjax.ops.base import memory
from kvjax.read.low_bits import CopiesInFewBits
from kvjax.state.cache import host_nbytes, nbytes
from kvjax.store.affine import Affine
from tests.float64.codes import affine
from tests.float64.reads_by_index import specache
from tests.float64.reference import Decoder, Prompt, Row
from tests.methods.battery import MAIN, B, off
from tests.models import conversation
from tests.read.test_persistent import model, quarter

HYPER = dict(budget=0.25, group=16, newest=3)
BITS = 8
TOKENS = np.random.default_rng(7).integers(0, 64, (6, B))


def talked(method, m, turns=(MAIN.first,)):
    """Logits of prompts and of steps after each, and the cache after them."""
    cache, found = None, []
    for prompt in turns:
        logits, cache = kvjax.prefill(m, prompt, cache=cache, method=None if cache else method, room=8)
        found.append(logits)
        for token in TOKENS:
            logits, cache = kvjax.step(m, cache, token)
            found.append(logits)
    return np.stack(found), cache


@cache
def on_device():
    return talked(kvjax.method("specache", bits=BITS, **HYPER), model(layers=2))[0]


def test_a_step_reads_exactly_what_the_token_before_ranked_best_and_copies_of_all_else():
    m, seen, rows = model(layers=2), [], []
    for tokens in MAIN.first:
        prompt, attends = (
            Prompt(Decoder(m), tokens),
            specache(quarter, code=affine(BITS, 16), newest=3, seen=seen),
        )
        rows.append(Row(prompt, [np.ones((len(k), len(tokens)), bool) for k in prompt.k], attends=attends))
    for token, found in zip(TOKENS, on_device()[1:], strict=True):
        assert off(found, np.stack([r.step(t) for r, t in zip(rows, token, strict=True)])) < 2e-4
    # The first step reads its own selection; later ones find some of theirs in that of the token before.
    share = [both / own for both, own in seen]
    assert share[: 4 * B // 2] == [1.0] * (2 * B) and 0.2 < np.mean(share[4 * B :]) < 0.95


@pytest.mark.rotating
def test_with_all_slots_read_no_copy_answers():
    m = model(layers=2)
    whole = kvjax.method("specache", **HYPER | dict(budget=1.0))
    turns = MAIN.first, MAIN.second
    assert off(talked(whole, m, turns)[0], talked(kvjax.method("full"), m, turns)[0]) < 1e-5
    # Behind unequal heads as well, whose slots lie in pages.
    keep = kvjax.method("adakv", budget=0.5, window=4)
    got, want = (talked(x, m, turns)[0] for x in (kvjax.chain(keep, whole), keep))
    assert off(got, want) < 1e-5


def test_slots_in_host_memory_change_no_number_and_the_copy_lies_on_the_device():
    on_host = kvjax.method("specache", bits=BITS, resident=0.0, **HYPER)
    got, cache = talked(on_host, model(layers=2))
    np.testing.assert_array_equal(got, on_device())
    bodies = [group.bodies[0] for group in cache.groups]
    far = sum(nbytes((b.k, b.v)) for b in bodies)
    assert host_nbytes(cache) == (far if memory.offers_host() else 0)
    # Its bits, and a scale and a zero of 16 bits for each 16 channels, where a number has 32.
    assert sum(nbytes(b.summary) for b in bodies) * 32 == (BITS + 2 * 16 / 16) * far
    assert all(b.near.slots.capacity < b.capacity / 2 for b in bodies)


def test_models_and_parts_that_it_does_not_fit_are_refused():
    with pytest.raises(kvjax.InputError, match="a selection is that of one layer"):
        kvjax.prefill(
            conversation.model("yoco"),
            conversation.TEXTS[:2, :13],
            method=kvjax.method("specache", budget=0.5, group=8),
            room=8,
        )
    with pytest.raises(ValueError, match="at most one read"):
        kvjax.chain(kvjax.method("specache", **HYPER), kvjax.method("quest", budget=0.5))
    with pytest.raises(kvjax.InputError, match="specache cannot store keys of 16 channels"):
        kvjax.prefill(model(layers=2), MAIN.first, method=kvjax.method("specache", budget=0.5, group=32))
    with pytest.raises(ValueError, match="copies are encoded token by token"):
        CopiesInFewBits(Budget(0.5), copies=Affine(2, axis="channel", group=8))
