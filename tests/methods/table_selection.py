"""Rows of methods that choose by what tokens are, by heads and layers, and of merges; see `table.py`."""

from __future__ import annotations

import numpy as np

from tests.float64 import dynamic, merges
from tests.float64.reference import window_score
from tests.methods import selection
from tests.methods.expected import chooses, citrus_score, each_layer, ends, headkv_kept
from tests.methods.rows import (
    KERNEL,
    PAGE,
    SNAP,
    THETA,
    WINDOW,
    chained,
    coded,
    count,
    dense,
    due_by_2,
    everything,
    half,
    half_and_one,
    paged,
    plain,
    queries_of,
    row,
)

SELECTION = [
    row(
        "sepllm", dense(half_and_one, extra=4),
        hyper=dict(separators=selection.SEPARATORS, sinks=2, window=3),
        kept=each_layer(selection.separators_first, ends(2, 3)), victim=selection.sepllm_victim,
    ),
    row(
        "sirllm", dense(half, extra=4), hyper=dict(sinks=2, window=3, decay=0.5, turn=9),
        kept=each_layer(selection.sirllm_score, ends(2, 3)), phase="rank",
    ),
    row(
        "keyformer", dense(half_and_one, extra=4), hyper=selection.KEYFORMER.hyper,
        kept=selection.KEYFORMER.kept, victim=selection.KEYFORMER.victims, leave=selection.KEYFORMER.leave,
    ),
    row(
        "scissorhands", lambda s: dense(due_by_2)(s) + queries_of(6)(s),
        hyper=dict(history=6, newest=3, drop=2), **chooses(selection.neglect(6, 3), due=2),
    ),
    chained(
        "alisa", lambda s: dense(half_and_one, slot=coded(8))(s) + queries_of(WINDOW)(s),
        ("alisa", dict(budget=0.5, window=WINDOW, recent=0.4)), error=0.02,
        **chooses(selection.looked_at(WINDOW, 0.4)),
    ),
    row(
        "windowkv", dense(half), hyper=selection.PIECES | dict(window=WINDOW),
        kept=each_layer(selection.windowkv_score, ends(0, WINDOW)), model="deep",
    ),
    row(
        "shotkv", lambda s: dense(half_and_one, extra=8)(s) + queries_of(2)(s),
        hyper=dict(separators=selection.SEPARATORS, window=2, written=0.05), whole=dict(written=0.0),
        kept=dynamic.scope_kept(count, selection.shotkv_score, 0.05),
        victim=dynamic.scope_victims(count, 2),
    ),
    row(
        "snapstream", lambda s: dense(half_and_one, extra=4)(s) + queries_of(2)(s),
        hyper=dict(written=0.05, window=2, kernel=KERNEL),
        whole=dict(written=0.0),
        kept=dynamic.scope_kept(count, lambda p, i: window_score(p, i, 2, KERNEL), 0.05),
        victim=dynamic.ring_victims(count, 2),
    ),
    row(
        "laq", dense(half), hyper=dict(ahead=selection.AHEAD, window=2, kernel=KERNEL),
        kept=each_layer(selection.laq_score, ends(0, 2)),
    ),
    row(
        "citrus", dense(half), hyper=dict(question=WINDOW), kept=each_layer(citrus_score), phase="rank",
        looks_ahead=True,
    ),
    row(
        "lazyllm", dense(everything), hyper=dict(layer=selection.LAZY_LAYER, share=0.6),
        kept=selection.lazy_kept, narrow=selection.lazy_goes_on, model="deep",
    ),
    row(
        "dbudgetkv", paged(lambda s, i: s.k * s.tokens, slot=lambda s: plain(s) + 4),
        hyper=dict(loss=selection.LOSS, sinks=2, page=PAGE), kept=selection.dbudgetkv_kept, counted=True,
    ),
    row(
        "kv-compress", paged(lambda s, i: s.k * count(s.tokens), one_pool=True),
        hyper=dict(window=WINDOW, page=PAGE), kept=selection.kv_compress_kept,
    ),
    row(
        "leankv", selection.lean_bytes, hyper=selection.LEAN | dict(share=0.7, window=2, page=PAGE),
        error=0.9, counted=True,
    ),
    row(
        "fastgen", paged(lambda s, i: s.k * s.tokens, slot=lambda s: plain(s) + 8),
        hyper=selection.LADDER | dict(separators=selection.SEPARATORS, page=PAGE),
        kept=selection.fastgen_kept, counted=True, model="deep",
    ),
    row(
        "zeromerge", dense(half_and_one, extra=8), hyper=dict(share=0.2), **selection.zeromerge(0.2),
    ),
    row(
        "ems", dense(half, extra=8), hyper=dict(window=3, kernel=KERNEL, threshold=0.3, sinks=1),
        kept=each_layer(selection.ems_score, ends(1, 3)), leave=merges.counted(THETA, count, 0.3),
    ),
    row(
        "kvmerger", dense(half, extra=8), hyper=selection.KVMERGER,
        kept=each_layer(selection.kvmerger_score, ends(1, 3)),
        leave=merges.kvmerger(THETA, **selection.KVMERGER),
    ),
    # Where no layer shares; tests/make/test_shared_layers.py has others.
    row("kvsharer", dense(everything), hyper=dict(fitted=selection.OWN_LAYERS), model="deep"),
    row(
        "retrieval-head", paged(lambda s, i: s.k * count(s.tokens), one_pool=True),
        hyper=SNAP | dict(page=PAGE, fitted=selection.PROFILE), kept=headkv_kept,
    ),
    row(
        "razorattention",
        lambda s: paged(lambda s, i: s.k * s.tokens)(s) + s.layers * s.b * s.k * (2 * s.h + 1) * 4,
        hyper=selection.RAZOR | dict(fitted=selection.LOOKS_BACK, page=PAGE), kept=selection.razor_kept,
        leave=merges.Compensated(THETA), counted=True,
    ),
    row(
        "compressive-transformer", lambda s: dense(lambda s: count(s.tokens + s.room) + 3)(s),
        hyper=dict(rate=3, recent=0.4), whole=dict(recent=1.0), counted=True, kept=selection.COMPRESSIVE.kept,
        victim=selection.COMPRESSIVE.victims, leave=selection.COMPRESSIVE.leave,
    ),
    row(
        "freqkv", dense(due_by_2), hyper=selection.FREQUENCIES, kept=selection.FREQKV.kept, phase="rank",
        victim=selection.FREQKV.victims, leave=selection.FREQKV.leave,
    ),
    row(
        "entropy-gated-chunkkv", dense(half), hyper=SNAP | selection.GATED, kept=selection.gated_kept,
    ),
    row(
        "evolkv", paged(lambda s, i: s.k * count(s.tokens), one_pool=True),
        hyper=SNAP | dict(page=PAGE, fitted=selection.SEARCHED), kept=selection.evolkv_kept,
    ),
    row(
        "triattention", dense(due_by_2), hyper=dict(fitted=selection.CENTRES, every=2, farthest=64),
        **chooses(selection.triattention(64), due=2),
    ),
    row(
        "pyramidinfer", paged(lambda s, i: s.k * count(s.tokens), one_pool=True), model="deep",
        hyper=selection.PYRAMID | dict(page=PAGE), kept=selection.pyramidinfer_kept,
    ),
    row(
        "epicache", paged(lambda s, i: s.k * count(s.tokens), one_pool=True),
        hyper=dict(episode=selection.EPISODE, fitted=selection.DRIFTS, sinks=2, page=PAGE),
        kept=selection.epicache_kept,
    ),
    row(
        "lukv", paged(lambda s, i: s.k * count(s.tokens), one_pool=True),
        hyper=dict(fitted=selection.CURVES, future=64, epsilon=0.05, page=PAGE), kept=selection.lukv_kept,
    ),
    # Where every head attends for itself; tests/make/test_clustered_heads.py has others. All heads are one
    # list, of a mixer whose layers the test of stacks does not make.
    row(
        "chai", lambda s: dense(everything, 1, lambda s: s.k * 2 * s.h * 4 + 4)(s), error=None, stacks=False,
        hyper=dict(fitted=selection.OWN_HEADS), kept=lambda p: [np.ones((1, p.length), bool)] * len(p.k),
    ),
    row(
        "attention-matching", dense(half, extra=4), hyper=dict(queries=WINDOW),
        # Least squares in float32, in directions down to 1/100 of the largest.
        kept=each_layer(selection.matched_score), leave=merges.matched(THETA, WINDOW), error=3e-4,
    ),
]  # fmt: skip
