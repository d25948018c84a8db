"""Thresholds that a prompt's queries calibrate: how many slots are read, and what counts for the others."""

import numpy as np
import pytest

import kvjax
from tests.float64.reads import top_theta
from tests.float64.reference import Decoder, Prompt, Row
from tests.methods.battery import MAIN, B, off
from tests.read.test_persistent import model, quarter

WINDOW, NEWEST, STEPS = 8, 2, 4
TOKENS = np.random.default_rng(6).integers(0, 64, (STEPS, B))


@pytest.mark.parametrize("room", [3, pytest.param(1, marks=pytest.mark.rotating)])
def test_how_many_slots_are_read_follows_from_the_data(room):
    m = model(layers=2)
    method = kvjax.method("top-theta", budget=0.25, window=WINDOW, room=room, newest=NEWEST)
    _, cache = kvjax.prefill(m, MAIN.first, method=method, room=STEPS)
    rows, seen = [], []
    for tokens in MAIN.first:
        prompt = Prompt(Decoder(m), tokens)
        attends = top_theta(quarter, window=WINDOW, room=room, newest=NEWEST, seen=seen)
        rows.append(Row(prompt, [np.ones((len(k), len(tokens)), bool) for k in prompt.k], attends=attends))
    for token in TOKENS:
        logits, cache = kvjax.step(m, cache, token)
        assert off(logits, np.stack([r.step(t) for r, t in zip(rows, token, strict=True)])) < 3e-5
    read, old = np.array(seen).T
    # Two heads of a group read what either does, so it is a quarter or more on average, and varies.
    share = read / old
    assert (share <= room * 0.25).all() and len(set(read - [quarter(x) for x in old])) > (
        1 if room == 1 else 3
    )
    assert share.mean() > 0.25 or room == 1


@pytest.mark.rotating
def test_a_row_that_ends_in_an_earlier_chunk_keeps_its_thresholds():
    m = model(layers=2)
    method = kvjax.method("top-theta", budget=0.25, window=WINDOW, newest=NEWEST)
    thresholds = []
    for prompts in ([MAIN.first[0], MAIN.first[3]], [MAIN.first[3]]):
        _, cache = kvjax.prefill(m, prompts, method=method, room=16, chunk=16)
        thresholds.append([np.asarray(group.bodies[0].sums["threshold"])[:, -1] for group in cache.groups])
    np.testing.assert_allclose(*thresholds, rtol=1e-5)
    assert np.isfinite(thresholds).all()
