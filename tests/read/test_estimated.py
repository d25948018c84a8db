"""Clusters that are estimated: counts and sums that follow the slots that come and leave, in float64."""

import numpy as np
import pytest

import kvjax
from tests.float64.reads import retroinfer
from tests.float64.reference import Decoder, Prompt, Row
from tests.methods.battery import MAIN, B, off
from tests.read.test_persistent import model

HYPER = dict(clusters=8, turns=3, estimate=0.25, sinks=2, newest=2)
METHOD = kvjax.method("retroinfer", budget=0.5, **HYPER)
TOKENS = np.random.default_rng(7).integers(0, 64, (5, B))


def half(slots):
    return max(1, slots // 2)


def test_clusters_are_read_estimated_and_left_out_as_tokens_join_them():
    m, seen = model(layers=2), []
    _, cache = kvjax.prefill(m, MAIN.first, method=METHOD, room=8)
    rows = []
    for tokens in MAIN.first:
        prompt, attends = Prompt(Decoder(m), tokens), retroinfer(half, **HYPER, seen=seen)
        rows.append(Row(prompt, [np.ones((len(k), len(tokens)), bool) for k in prompt.k], attends=attends))
    for token in TOKENS:
        logits, cache = kvjax.step(m, cache, token)
        assert off(logits, np.stack([r.step(t) for r, t in zip(rows, token, strict=True)])) < 3e-5
    assert (np.array(seen).mean(0) > 1).all()


@pytest.mark.rotating
def test_sums_are_those_of_the_slots_that_are_there():
    """After steps in which slots come and leave: counts and sums of every cluster, summed anew."""
    m, method = model(layers=2), kvjax.chain(kvjax.method("h2o(budget=0.5)"), METHOD)
    _, cache = kvjax.prefill(m, MAIN.first, method=method, room=8)
    before = [np.asarray(group.bodies[0].sums["counts"]) for group in cache.groups]
    for token in TOKENS:
        _, cache = kvjax.step(m, cache, token)
    for group, counts in zip(cache.groups, before, strict=True):
        (body,) = group.bodies
        keys, sums = body.layer(0).keys(), {n: np.asarray(x[0]) for n, x in body.sums.items()}
        there = (np.asarray(keys.pos) >= HYPER["sinks"])[..., None]
        mine = np.eye(HYPER["clusters"])[np.asarray(body.summary["cluster"][0])] * there
        assert np.array_equal(sums["counts"], mine.sum(2)) and not np.array_equal(sums["counts"], counts[0])
        for name, x in (("keys", keys.k), ("values", keys.v)):
            np.testing.assert_allclose(sums[name], np.einsum("bksc,bksh->bkch", mine, x), atol=1e-4)
