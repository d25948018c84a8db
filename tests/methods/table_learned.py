"""Rows of methods with learned gates; see `table.py`."""

from __future__ import annotations

from tests.methods import controlled, learned, marked
from tests.methods.expected import chooses, each_layer, ends
from tests.methods.rows import (
    PAGE,
    WINDOW,
    chained,
    count,
    dense,
    due_by_2,
    everything,
    half,
    paged,
    plain,
    row,
    window_paged,
)

LEARNED = [
    row(
        "fast-kvzip", paged(lambda s, i: s.k * count(s.tokens), slot=lambda s: plain(s) + 4, one_pool=True),
        hyper=learned.FAST | dict(fitted=learned.SINK_GATE, page=PAGE),
        kept=learned.fast_kvzip_kept,
    ),
    row(
        "locret", dense(half, extra=4), hyper=dict(fitted=learned.RETAINING, newest=3),
        kept=each_layer(learned.retaining_score, ends(0, 3)),
    ),
    row(
        "wg-kv", window_paged(lambda s: plain(s) + 4),
        hyper=dict(fitted=learned.WRITE_GATE, threshold=learned.ADMITS, window=WINDOW, page=PAGE),
        kept=learned.wg_kv_kept, victim=learned.wg_kv_leaves, counted=True,
    ),
    row(
        "lococo", dense(due_by_2, extra=4),
        hyper=dict(newest=learned.NEWEST, segment=2, fitted=learned.CONV), leave=learned.conv_leave,
        **chooses(learned.by_attention, due=2),
    ),
    row(
        "dms", window_paged(lambda s: plain(s) + 4),
        hyper=dict(fitted=learned.EVICTION, window=WINDOW, page=PAGE),
        kept=learned.dms_kept, victim=learned.dms_leaves, counted=True,
    ),
    row(
        "attention-gate", paged(lambda s, i: s.k * s.tokens, slot=lambda s: plain(s) + 4),
        hyper=dict(fitted=learned.ATTENTION_GATE, page=PAGE), kept=learned.attention_gate_kept, counted=True,
    ),
    row(
        "dmc", paged(lambda s, i: s.k * s.tokens, slot=lambda s: plain(s) + 12),
        hyper=dict(fitted=learned.RUNS, page=PAGE),
        kept=learned.dmc_kept, victim=learned.dmc_leaves, leave=learned.runs_merge, counted=True,
    ),
    row(
        "dcp", dense(everything, extra=4 * learned.INTERACTS), hyper=dict(fitted=learned.DROPPING),
        kept=learned.dcp_kept, victim=learned.dcp_leaves, hides=learned.dcp_hides, counted=True,
    ),
    row(
        "kv-distill", dense(half), hyper=dict(layer=marked.SCORER_LAYER, fitted=marked.DISTILLED),
        reread=marked.distilled, kept=marked.distilled_kept, stacks=False,
        whole=dict(fitted=marked.WITHOUT_EFFECT),
    ),
    # Restore tokens take slots even where all would stay, so no budget keeps everything.
    chained(
        "restorekv", paged(lambda s, i: s.k * count(s.tokens), one_pool=True),
        (
            "restorekv",
            dict(
                budget=0.5, tokens=marked.RESTORED.tokens, fitted=marked.RESTORED.fitted, page=PAGE, sinks=1,
                prefix=marked.RESTORED.prefix,
            ),
        ),
        reread=marked.RESTORED, kept=marked.RESTORED.kept,
    ),
    row(
        "gisting", dense(lambda s: marked.GISTS + 1 + s.room),
        hyper=dict(tokens=marked.GISTS, fitted=marked.GIST),
        reread=marked.Remembers(marked.GIST, marked.GISTS),
    ),
    row(
        "ccm", dense(lambda s: -(-(s.tokens - 1) // marked.CHUNK) * marked.COMPS + 1 + s.room),
        hyper=dict(tokens=marked.COMPS, chunk=marked.CHUNK, fitted=marked.COMP),
        reread=marked.Remembers(marked.COMP, marked.COMPS, marked.CHUNK),
    ),
    row(
        "ccm-merge", dense(lambda s: marked.COMPS + 1 + s.room),
        hyper=dict(tokens=marked.COMPS, chunk=marked.CHUNK, fitted=marked.COMP),
        reread=marked.Remembers(marked.COMP, marked.COMPS, marked.CHUNK, mean=True),
    ),
    row(
        "loma", dense(lambda s: -(-(s.tokens - 1) // marked.RUN) * marked.MEMORIES + 1 + s.room),
        hyper=dict(tokens=marked.MEMORIES, ratio=marked.RATIO, fitted=marked.RUNS),
        reread=marked.RunsRemember(marked.RUNS, marked.MEMORIES, marked.RATIO), kept=marked.runs_kept,
    ),
    row(
        "adore", controlled.adore_bytes,
        hyper=dict(newest=controlled.KEEPS, bits=None, fitted=controlled.CONTROLLER),
        kept=each_layer(controlled.adore_score, ends(0, controlled.KEEPS)), victim=controlled.adore_leaves,
    ),
    row(
        "homer", dense(learned.homer_left), hyper=learned.CHUNKS | dict(fitted=learned.BIAS), model="deep",
        phase=learned.MERGING, narrow=learned.homer_goes_on, kept=learned.homer_kept, stacks=False,
    ),
    # Its answers are in tests/make/test_hidden_cache.py.
    row(
        "neurocache", learned.past_bytes, hyper=learned.PAST | dict(fitted=learned.STATES), model="deep",
        kept=learned.past_kept, error=None, stacks=False,
    ),
]  # fmt: skip
