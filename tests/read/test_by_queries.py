"""Indexes that a prompt's queries shape: what they scan, and how much of the exact best that finds."""

from unittest import mock

import jax
import numpy as np
import pytest

import kvjax
from kvjax.state.codes import dense
from kvjax.steps.decoding import attend
from kvjax.steps.decoding.picks import picked_from
from tests.float64.reads_by_index import a2ats, retrievalattention
from tests.float64.reference import Decoder, Prompt, Row
from tests.methods.battery import off
from tests.methods.rows import THETA
from tests.read.test_persistent import model, quarter
from tests.read.test_placed import PROMPTS, TOKENS

HYPER = dict(clusters=6, turns=3, window=8, sinks=2, newest=3)


def decoded(method, attends):
    """Largest errors of steps after PROMPTS, whose tokens leave the newest ones while they are decoded."""
    m = model(layers=2)
    _, cache = kvjax.prefill(m, PROMPTS, method=method, room=8)
    rows = []
    for tokens in PROMPTS:
        prompt = Prompt(Decoder(m), tokens)
        rows.append(Row(prompt, [np.ones((len(k), len(tokens)), bool) for k in prompt.k], attends=attends()))
    for token in TOKENS:
        logits, cache = kvjax.step(m, cache, token)
        yield off(logits, np.stack([r.step(t) for r, t in zip(rows, token, strict=True)]))


def test_the_best_of_the_scanned_keys_are_read_as_tokens_join_clusters():
    seen = []
    method = kvjax.method("retrievalattention", budget=0.25, scan=0.3, **HYPER)
    errors = decoded(method, lambda: retrievalattention(quarter, scan=0.3, **HYPER, seen=seen))
    assert max(errors) < 3e-5
    scanned, read, old = np.array(seen).T
    # Clusters are unequal: some queries scan fewer keys than they could read, others more.
    assert (read == np.minimum(scanned, [quarter(x) for x in old])).all()
    assert (scanned < read.max()).any() and (scanned > read).any()


@pytest.mark.rotating
def test_older_tokens_stand_at_one_distance():
    method = kvjax.method("a2ats", budget=0.25, **HYPER)
    assert max(decoded(method, lambda: a2ats(quarter, **HYPER, theta=THETA))) < 3e-5


@pytest.mark.rotating
def test_a_row_that_ends_in_an_earlier_chunk_keeps_its_index():
    m, method = model(layers=2), kvjax.method("a2ats", budget=0.25, **HYPER)
    found = []
    for prompts in ([PROMPTS[0], PROMPTS[3]], [PROMPTS[3]]):
        _, cache = kvjax.prefill(m, prompts, method=method, room=16, chunk=16)
        found.append([np.asarray(group.bodies[0].sums["centroids"])[:, -1] for group in cache.groups])
    np.testing.assert_allclose(*found, atol=1e-5)


def picks_of(model, ids, method, after):
    """Collect the slots picked by every layer and step after a prompt, with keys, and queries by group."""
    seen, parts_of = [], attend._parts

    def tapped(here, x):
        body, index = picked_from(here.past, here.pools)
        k, pos = dense(jax.tree.map(lambda y: y[index], body.k)), body.pos[index]
        q = x.q.reshape(k.shape[0], k.shape[1], -1, k.shape[3]).sum(2)
        picks = here.found.whole
        jax.debug.callback(lambda *found: seen.append(found), q, k, pos, picks.pages, picks.counts)
        return parts_of(here, x)

    jax.clear_caches()
    with mock.patch.object(attend, "_parts", tapped):
        _, cache = kvjax.prefill(model, [ids[:-after]], method=method, room=after)
        for token in ids[-after:]:
            _, cache = kvjax.step(model, cache, np.asarray([token]))
        jax.effects_barrier()
    jax.clear_caches()
    return seen


@pytest.mark.rotating
@pytest.mark.parametrize(("scan", "least"), [(0.25, 0.9), (1.0, 1.0)])
def test_a_quarter_of_the_clusters_holds_nine_tenths_of_the_exact_best_keys(scan, least):
    """Against all products of a trained model's queries with its keys, in float64."""
    m, sinks, newest, found = kvjax.load("recall-tiny"), 4, 32, []
    ids = m.tokenizer.encode(("<bos> <set> brave otter 17 4 52 <.> " + "a hill a river " * 5) * 8).ids
    method = kvjax.method(
        "retrievalattention", budget=0.1, scan=scan, clusters=32, window=64, sinks=sinks, newest=newest
    )
    for q, k, pos, pages, counts in picks_of(m, ids, method, 16):
        for head in range(pos.shape[1]):
            score = k[0, head].astype(float) @ q[0, head].astype(float)
            able = (pos[0, head] >= sinks) & (pos[0, head] < pos[0, head].max() - newest)
            able = np.flatnonzero(able)
            picked = {*pages[0, head, : counts[0, head]].tolist()} & {*able.tolist()}
            exact = able[np.argsort(-score[able], kind="stable")[: len(picked)]]
            found.append(len(picked & {*exact.tolist()}) / len(picked))
    assert np.mean(found) >= least
