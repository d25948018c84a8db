"""Rows of methods that choose by what tokens are, by heads and layers, and of merges; see `table.py`."""

from __future__ import annotations

from tests import merges
from tests.methods import selection
from tests.methods.expected import headkv_kept
from tests.methods.rows import PAGE, SNAP, THETA, count, paged, row

SELECTION = [
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
