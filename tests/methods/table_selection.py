"""Rows of methods that choose by what tokens are, by heads and layers, and of merges; see `table.py`."""

from __future__ import annotations

from tests import merges
from tests.methods import selection
from tests.methods.expected import each_layer, ends, headkv_kept
from tests.methods.rows import PAGE, SNAP, THETA, count, dense, half, half_and_one, paged, plain, row

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
        "fastgen", paged(lambda s, i: s.k * s.tokens, slot=lambda s: plain(s) + 8),
        hyper=selection.LADDER | dict(separators=selection.SEPARATORS, page=PAGE),
        kept=selection.fastgen_kept, counted=True, model="deep",
    ),
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
]  # fmt: skip
