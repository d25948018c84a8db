"""One row per method: how it is built, which tokens it must keep, its bytes. `test_battery.py` tests them.

A new method needs one `Row` in ROWS. Give it the numbers of its paper: `kept` as numpy over a float64 prompt
(see `tests/float64/reference.py`), `nbytes` as arithmetic over `PromptSizes`. Fields that do not apply keep
their default.
"""

from __future__ import annotations

import numpy as np

from tests.float64 import dynamic, layers, merges, reads, stacks
from tests.float64.ranges import Ranges
from tests.float64.reference import h2o_victim, rkv_kept, rkv_victims, sink_victim, tova_victim, window_score
from tests.methods.expected import (
    BUZZ,
    CAKE,
    COMPACT,
    CUR_WINDOW,
    DISTANCE,
    DUO_SINKS,
    FILTERS,
    FORGETTING,
    GATE,
    GATE_THRESHOLD,
    GATES,
    KERNELS,
    LADDER,
    LAG,
    LAST_WHOLE,
    LAZY,
    LEVELS,
    NACL_SHARE,
    PASSED,
    PREFIX,
    PREFIXES,
    PROFILE,
    SEMANTIC,
    WIDE,
    WINDOWS,
    ZIGZAG,
    adakv_kept,
    cake_kept,
    capkv_score,
    chooses,
    chunk_score,
    compactor_protects,
    compactor_score,
    critical_across_heads,
    critical_score,
    curdkv_score,
    duo_kept,
    duo_leaves,
    each_layer,
    ends,
    expected_score,
    faded,
    faded_slot,
    fastkv_goes_on,
    fastkv_kept,
    filtered_score,
    finch_score,
    gems,
    grouped_score,
    headkv_kept,
    infinipot_score,
    keydiff_score,
    kvcompose_kept,
    kvcrush_kept,
    kvzap_kept,
    kvzap_leaves,
    kvzip_kept,
    last_score,
    nacl_score,
    norm_score,
    position_score,
    pyramid_counts,
    pyramid_kept,
    random_score,
    received,
    recent_half,
    semantic_score,
    simlayer_kept,
    sinks,
    snap,
    tova_score,
    value_size,
    valued_mass,
    windowed,
)
from tests.methods.rows import (
    HASH,
    KERNEL,
    MINI,
    MINI_MOST,
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
    gear_bytes,
    granules_in_pages_bytes,
    half,
    half_and_one,
    holes_bytes,
    infllm_bytes,
    kivi_bytes,
    kvquant_bytes,
    magicpig_bytes,
    mikv_bytes,
    minicache_bytes,
    mustafar_bytes,
    paged,
    plain,
    quantspec_bytes,
    queries_of,
    quest_bytes,
    read_in_pages_bytes,
    read_with_holes_bytes,
    row,
    sparq_bytes,
    split,
    turboquant_bytes,
    window_paged,
)
from tests.methods.sensitivity import kvgrad_kept
from tests.methods.table_bases import BASES
from tests.methods.table_learned import LEARNED
from tests.methods.table_prompts import PROMPTS
from tests.methods.table_reads import READS
from tests.methods.table_selection import SELECTION
from tests.methods.table_stores import STORES

APE = dict(contexts=(6, 9, 4), shared_prefix=3, temperature=0.8, scale=0.9)

ROWS = [
    row("full", dense(everything), whole=(("full", {}),)),
    row("offloaded", dense(everything)),
    row("renumbered", dense(everything), phase="rank"),
    chained(
        "adakv + renumbered", paged(lambda s, i: s.k * count(s.tokens)),
        ("adakv", SNAP | dict(budget=0.5, page=PAGE)), ("renumbered", {}), kept=adakv_kept, phase="rank",
    ),
    row(
        "ape", dense(everything), hyper=APE, phase=Ranges(**APE),
    ),
    row("random", dense(half), kept=each_layer(random_score)),
    row(
        "sink-recent", dense(half_and_one), kept=each_layer(position_score, sinks), victim=sink_victim(count)
    ),
    row(
        "streamingllm", dense(half_and_one), kept=each_layer(position_score, sinks),
        victim=sink_victim(count), phase="rank",
    ),
    row(
        "hashevict", dense(half_and_one), hyper=dict(planes=12, sinks=2, newest=2),
        kept=dynamic.kept(count, dynamic.small_keys(2, 2)),
        victim=dynamic.victims(count, dynamic.hashevict(12, 2, 2), THETA),
    ),
    row(
        "pagedeviction", dense(due_by_2), hyper=dict(page=2),
        kept=dynamic.pagedeviction_kept(count, 2), victim=dynamic.pagedeviction_victims(count, 2),
    ),
    row(
        "lacache", dense(due_by_2, extra=4), hyper=LADDER.hyper, model="deep", phase="rank",
        kept=LADDER.kept, victim=LADDER.victims, leave=LADDER.leave, counted=True,
    ),
    row(
        "lacache wide", dense(due_by_2, extra=4), "lacache", hyper=WIDE.hyper, model="deep", phase="rank",
        kept=WIDE.kept, victim=WIDE.victims, leave=WIDE.leave, counted=True,
    ),
    row(
        "lm-infinite", dense(half_and_one), hyper=dict(sinks=4, distance=DISTANCE),
        kept=each_layer(position_score, sinks), victim=sink_victim(count), phase=DISTANCE,
        whole=dict(distance=64),
    ),
    row(
        "l2compress", lambda s: dense(half)(s) + 2 * s.b * s.k * (everything(s) - half(s)) * plain(s),
        hyper=dict(skip_layers=2), kept=each_layer(norm_score, skip=2), model="deep",
    ),
    row(
        "h2o", dense(half_and_one, extra=4), kept=each_layer(received, recent_half),
        victim=h2o_victim(count),
    ),
    row(
        "a2sf", dense(half_and_one, extra=4), hyper=dict(forgetting=FORGETTING), kept=each_layer(faded),
        victim=h2o_victim(count, recent=0, key=faded_slot),
    ),
    row("tova", dense(half_and_one), kept=each_layer(tova_score), victim=tova_victim(count)),
    row(
        "vatp", dense(half_and_one, extra=4), hyper=dict(sinks=2),
        kept=each_layer(
            lambda p, i: received(p, i) * value_size(p, i),
            lambda p: (np.arange(p.length) < 2) | recent_half(p),
        ),
        victim=h2o_victim(count, key=valued_mass, sinks=2),
    ),
    row(
        "morphkv", lambda s: dense(half_and_one)(s) + queries_of(WINDOW)(s), hyper=dict(window=WINDOW),
        **chooses(dynamic.morphkv(WINDOW, "sum")),
    ),
    row(
        "roco", dense(half_and_one, extra=8), hyper=dict(newest=2, sinks=1, steady=0.4),
        **chooses(dynamic.roco(2, 1, 0.4)),
    ),
    row(
        "corm", lambda s: dense(half_and_one)(s) + queries_of(WINDOW)(s),
        hyper=dict(window=WINDOW, newest=3, threshold=2.5), whole=dict(threshold=0), counted=True,
        **chooses(dynamic.corm(WINDOW, 3, 2.5)),
    ),
    row(
        "buzz", dense(due_by_2, extra=8), hyper=BUZZ.hyper,
        kept=BUZZ.kept, victim=BUZZ.victims, leave=BUZZ.leave, counted=True,
    ),
    row(
        "scope", lambda s: dense(half_and_one, extra=4)(s) + queries_of(2)(s),
        hyper=dict(written=0.05, window=2, kernel=KERNEL), whole=dict(written=0.0),
        kept=dynamic.scope_kept(count, lambda p, i: window_score(p, i, 2, KERNEL), 0.05),
        victim=dynamic.scope_victims(count, 2),
    ),
    row("criticalkv", dense(half), hyper=SNAP, kept=each_layer(critical_score)),
    chained(
        "criticalkv + int4", paged(lambda s, i: s.k * count(s.tokens), slot=coded(4, 2)),
        ("criticalkv", SNAP | dict(budget=0.5, page=PAGE, across_heads=True)), ("int4", dict(group=8)),
        kept=critical_across_heads, error=0.3,
    ),
    row(
        "kvzap", window_paged(lambda s: plain(s) + 4),
        hyper=dict(fitted=GATE, threshold=GATE_THRESHOLD, window=WINDOW, page=PAGE), kept=kvzap_kept,
        victim=kvzap_leaves, counted=True,
    ),
    row(
        "r-kv", lambda s: dense(due_by_2)(s) + queries_of(WINDOW)(s),
        hyper=SNAP | dict(buffer=2), kept=rkv_kept(count, **SNAP),
        victim=rkv_victims(count, 2, THETA, **SNAP),
    ),
    row(
        "snapkv", lambda s: dense(half, s.n)(s), hyper=SNAP | dict(variant="paper"),
        kept=each_layer(snap(per_query_head=True)),
    ),
    row(
        "snapkv kvpress", dense(half), "snapkv", hyper=SNAP | dict(variant="kvpress"), model="6/3",
        kept=each_layer(snap(reduce="mean", kind="mean")),
    ),
    row(
        "snapkv windowed", lambda s: dense(half)(s) - 2 * s.b * s.k * (half(s) - WINDOWS[0] - 1) * plain(s),
        "snapkv", hyper=SNAP | dict(variant="kvpress"), model="windowed",
        kept=windowed(each_layer(snap(reduce="mean", kind="mean")), WINDOWS),
    ),
    row(
        "pyramidkv", paged(lambda s, i: s.n * int(pyramid_counts(s.tokens, s.layers)[i]), lambda s: s.n),
        hyper=SNAP | dict(page=PAGE, variant="paper"), kept=pyramid_kept(per_query_head=True), model="deep",
    ),
    row(
        "fastkv", dense(half), hyper=SNAP | dict(tsp_layer=LAST_WHOLE, share=PASSED), kept=fastkv_kept,
        whole=dict(share=1.0), narrow=fastkv_goes_on, model="deep",
    ),
    row(
        "cake", paged(lambda s, i: s.k * count(s.tokens), one_pool=True),
        hyper=SNAP | CAKE | dict(page=PAGE), kept=cake_kept, model="deep",
    ),
    row(
        "zigzagkv", paged(lambda s, i: s.k * count(s.tokens), one_pool=True), model="deep",
        hyper=SNAP | ZIGZAG | dict(page=PAGE), kept=layers.zigzagkv(count, **SNAP, **ZIGZAG),
    ),
    row(
        "dynamickv", paged(lambda s, i: s.k * count(s.tokens), one_pool=True), model="deep",
        hyper=SNAP | dict(most=1.2, page=PAGE), kept=layers.dynamickv(count, **SNAP, most=1.2),
    ),
    row(
        "prefixkv",
        paged(lambda s, i: s.k * count(s.tokens), slot=lambda s: plain(s) + 4, one_pool=True), model="deep",
        hyper=PREFIXES | dict(page=PAGE), kept=layers.prefixkv(count, **PREFIXES),
    ),
    row(
        "headkv", paged(lambda s, i: s.k * count(s.tokens), one_pool=True),
        hyper=SNAP | dict(page=PAGE, fitted=PROFILE), kept=headkv_kept,
    ),
    row(
        "duoattention", window_paged(),
        hyper=dict(fitted=GATES, sinks=DUO_SINKS, window=WINDOW, page=PAGE), kept=duo_kept,
        victim=duo_leaves, counted=True,
    ),
    row(
        "gemfilter", dense(half), hyper=dict(filter_layer=0, kernel=KERNEL), reread=gems, stacks=False,
    ),
    row("adakv", paged(lambda s, i: s.k * count(s.tokens)), hyper=SNAP | dict(page=PAGE), kept=adakv_kept),
    row(
        "finch", dense(half), hyper=dict(question=WINDOW), kept=each_layer(finch_score), phase="rank",
        looks_ahead=True,
    ),
    row("snapkv grouped", dense(half), "snapkv", hyper=SNAP, model="6/3", kept=each_layer(grouped_score)),
    row(
        "pyramidkv grouped", paged(lambda s, i: s.k * int(pyramid_counts(s.tokens, s.layers)[i])),
        "pyramidkv", hyper=SNAP | dict(page=PAGE), kept=pyramid_kept(), model="deep",
    ),
    row(
        "expected-attention", dense(half), hyper=dict(future=64),
        kept=each_layer(expected_score, sinks),
    ),
    row("keydiff", dense(half), kept=each_layer(keydiff_score)),
    row("curdkv", dense(half), hyper=dict(window=CUR_WINDOW), kept=each_layer(curdkv_score, sinks)),
    row(
        "compactor", dense(half, extra=4), hyper=COMPACT,
        kept=each_layer(compactor_score, compactor_protects),
    ),
    row("capkv", dense(half), hyper=dict(future=64), kept=each_layer(capkv_score, sinks)),
    row(
        "q-filters", dense(half), hyper=dict(fitted=FILTERS, newest=3),
        kept=each_layer(filtered_score, ends(0, 3)),
    ),
    row(
        "sage-kv", dense(half), hyper=dict(sinks=1, window=WINDOW),
        kept=each_layer(last_score, ends(1, WINDOW)),
    ),
    row(
        "nacl", dense(half), hyper=dict(window=WINDOW, share=NACL_SHARE, sinks=1),
        kept=each_layer(nacl_score, ends(1, WINDOW)),
    ),
    row(
        "compresskv", dense(half), hyper=SNAP | dict(heads=2, fitted=SEMANTIC),
        kept=each_layer(semantic_score, ends(0, WINDOW)),
    ),
    row("kvcrush", dense(half), hyper=SNAP | dict(share=0.5), kept=kvcrush_kept, model="6/3"),
    row(
        "simlayerkv", paged(lambda s, i: s.k * s.tokens), hyper=LAZY | dict(page=PAGE), kept=simlayer_kept,
        model="deep", counted=True,
    ),
    row(
        "lagkv", dense(lambda s: half_and_one(s) - 1 + LAG.lag, extra=4),
        hyper=dict(lag=LAG.lag, sinks=LAG.sinks), kept=LAG.kept, victim=LAG.victims, leave=LAG.leave,
    ),
    row(
        "kvzip", paged(lambda s, i: s.k * count(s.tokens), one_pool=True),
        hyper=dict(page=PAGE, prefix=PREFIX), kept=kvzip_kept,
    ),
    row(
        "kvgrad", paged(lambda s, i: s.k * count(s.tokens), one_pool=True),
        hyper=dict(page=PAGE, prefix=PREFIX), kept=kvgrad_kept,
    ),
    row(
        "kvcompose", paged(lambda s, i: s.k * count(s.tokens), one_pool=True), hyper=dict(page=PAGE),
        kept=kvcompose_kept, model="deep",
    ),
    row(
        "infinipot", dense(half, extra=4), hyper=dict(share=0.5, prefix=PREFIX),
        kept=each_layer(infinipot_score), phase="rank",
    ),
    row(
        "chunkkv", dense(half), hyper=dict(chunk=3, window=WINDOW, reuse=2), kept=each_layer(chunk_score),
        model="deep",
    ),
    row("keepkv", dense(half_and_one, extra=8), kept=each_layer(received, recent_half), error=None),
    row(
        "d2o", lambda s: dense(half_and_one, extra=4)(s) + 4 * s.layers * s.b, hyper=dict(sinks=2),
        kept=each_layer(received, lambda p: (np.arange(p.length) < 2) | recent_half(p)),
        victim=h2o_victim(count, sinks=2), leave=merges.d2o(THETA),
    ),
    row(
        "cam", dense(half_and_one, extra=4), hyper=dict(following=3), kept=each_layer(received, recent_half),
        victim=h2o_victim(count), leave=merges.cam(3),
    ),
    row(
        "cam window", dense(half_and_one), id="cam", hyper=dict(variant="window", following=3),
        kept=each_layer(lambda p, i: 0 * received(p, i) - np.arange(p.length), recent_half),
        victim=h2o_victim(count, key=lambda slot: -slot["pos"]), leave=merges.cam_by_the_newest(3),
    ),
    row(
        "less", lambda s: dense(half_and_one, extra=4)(s) + 4 * s.layers * s.b * s.k * 3 * (s.h + 1),
        hyper=dict(fitted=KERNELS), kept=each_layer(received, recent_half), victim=h2o_victim(count),
        leave=merges.Less(KERNELS.arrays, THETA),
    ),
    # At full rank; tests/api/test_prepare.py has lower ones.
    row("palu", dense(everything), hyper=dict(rank=1.0, heads=1)),
    row(
        "minicache", minicache_bytes(lambda s: 4 * s.h), hyper=dict(MINI, most=MINI_MOST), model="deep",
        moves=False, stacks=False,
        stored=stacks.minicache(1, **MINI, most=lambda length: max(1, int(MINI_MOST * length))),
    ),
    row(
        "mustafar", mustafar_bytes, hyper=dict(residual=4), moves=False,
        whole=(("mustafar", dict(keys=1.0, values=1.0)),), attends=reads.mustafar(0.5, 4),
    ),
    row("int8", dense(everything, slot=coded(8)), error=0.02),
    row("int4", dense(everything, slot=coded(4, 2)), hyper=dict(group=8), error=0.3),
    row("fp8", dense(everything, slot=lambda s: 2 * (s.h + 2) + 4), error=0.2),
    row("turboquant", dense(everything, slot=turboquant_bytes), error=0.8),
    row("quarot", dense(everything, slot=coded(4)), error=0.3),
    row(
        "kivi", kivi_bytes(4), hyper=dict(bits=4, group=16, residual=16), error=0.3, moves=False
    ),
    row(
        "quantspec", quantspec_bytes, hyper=dict(group=16, residual=16), error=0.03, moves=False
    ),
    row(
        "gear", gear_bytes(4, 2), hyper=dict(bits=4, group=16, rank=2, outliers=0.1), error=0.1, moves=False
    ),
    row("kvquant", kvquant_bytes, hyper=dict(bits=4, fitted=LEVELS), error=0.3),
    chained("mikv", mikv_bytes, ("mikv", dict(budget=0.5, low=4, group=8)), error=0.3),
    row("quest", quest_bytes, hyper=dict(page=8, skip_layers=2), error=None, moves=False, model="deep"),
    row(
        "infllm", infllm_bytes, hyper=dict(page=4, newest=8, sinks=4, keys=2), error=None, moves=False,
    ),
    row(
        "sparq", sparq_bytes, hyper=dict(channels=5, newest=4), moves=False,
        attends=reads.sparq(count, channels=5, newest=4),
    ),
    row(
        "tidaldecode", split(everything, 1, 4, lambda s: 0, plain),
        hyper=dict(skip_layers=0, reselect=1, newest=4), model="deep", moves=False, stacks=False,
        attends=reads.tidal(count, picks=(0, 1), newest=4),
    ),
    row(
        "magicpig", magicpig_bytes, hyper=HASH | dict(skip_layers=0), whole=dict(planes=1, tables=256),
        moves=False, attends=reads.magicpig(count, **HASH),
    ),
    chained(
        "snapkv + kivi", kivi_bytes(2, slots=half), ("snapkv", SNAP | dict(budget=0.5, variant="kvpress")),
        ("kivi", dict(bits=2, group=16, residual=16)), kept=each_layer(snap(reduce="mean", kind="mean")),
        error=0.8, moves=False,
    ),
    chained(
        "adakv + int4", paged(lambda s, i: s.k * count(s.tokens), slot=coded(4, 2)),
        ("adakv", SNAP | dict(budget=0.5, page=PAGE)), ("int4", dict(group=8)), kept=adakv_kept, error=0.3,
    ),
    chained(
        "h2o + int8", dense(half_and_one, slot=coded(8), extra=4), ("h2o", dict(budget=0.5)), ("int8", {}),
        kept=each_layer(received, recent_half), error=0.02, victim=h2o_victim(count),
    ),
    *SELECTION,
    *LEARNED,
    *READS,
    *PROMPTS,
    *STORES,
    *BASES,
]  # fmt: skip

FURTHER = [
    chained(
        "h2o + kivi",
        holes_bytes,
        ("h2o", dict(budget=0.5)),
        ("kivi", dict(bits=8, group=4, residual=4)),
        kept=each_layer(received, recent_half),
        error=0.02,
        victim=h2o_victim(count),
    ),
    chained(
        "adakv + kivi",
        granules_in_pages_bytes,
        ("adakv", SNAP | dict(budget=0.5, page=PAGE)),
        ("kivi", dict(bits=8, group=4, residual=4)),
        kept=adakv_kept,
        error=0.02,
        moves=False,
    ),
    chained(
        "h2o + quest",
        read_with_holes_bytes,
        ("h2o", dict(budget=0.5)),
        ("quest", dict(budget=0.5, page=4, skip_layers=0)),
        kept=each_layer(received, recent_half),
        error=None,
        moves=False,
        victim=h2o_victim(count),
    ),
    chained(
        "adakv + quest",
        read_in_pages_bytes,
        ("adakv", SNAP | dict(budget=0.5, page=PAGE)),
        ("quest", dict(budget=0.5, page=4, skip_layers=0)),
        kept=adakv_kept,
        error=None,
        moves=False,
    ),
]
BY_LABEL = {r.label: r for r in (*ROWS, *FURTHER)}
