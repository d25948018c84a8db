"""Segments that are picked without positions and closed up, in float64."""

import numpy as np
import pytest

import kvjax
from kvjax.grammar import Budget, Method
from kvjax.read.placed import PlacedSegments
from tests.float64.reads import reattention
from tests.float64.reference import Decoder, Prompt, Row
from tests.methods.battery import B, off
from tests.methods.rows import THETA
from tests.read.test_persistent import model, quarter

HYPER = dict(page=2, newest=3, sinks=2)
# No token comes twice in a row, so that segments do not tie.
DRAWN = [np.random.default_rng(n).permutation(64) for n in range(B)]
PROMPTS = [row[:length].tolist() for row, length in zip(DRAWN, (32, 27, 20, 16), strict=True)]
TOKENS = np.stack([row[-5:] for row in DRAWN], 1)


def test_what_is_read_stands_right_before_the_newest_tokens():
    m, seen = model(layers=2), []
    method = kvjax.method("reattention", budget=0.25, **HYPER)
    _, cache = kvjax.prefill(m, PROMPTS, method=method, room=8)
    rows = []
    for tokens in PROMPTS:
        prompt, attends = Prompt(Decoder(m), tokens), reattention(quarter, **HYPER, theta=THETA, seen=seen)
        rows.append(Row(prompt, [np.ones((len(k), len(tokens)), bool) for k in prompt.k], attends=attends))
    for token in TOKENS:
        logits, cache = kvjax.step(m, cache, token)
        assert off(logits, np.stack([r.step(t) for r, t in zip(rows, token, strict=True)])) < 3e-5
    # A quarter of up to 34 older tokens, a page more of sinks and of rounding, and 3 or 4 newest ones.
    assert max(seen) <= 34 // 4 + 2 * 2 + 4 < len(PROMPTS[0]) - 1


@pytest.mark.rotating
def test_a_keep_leaves_gaps_that_are_closed_like_others():
    """SnapKV's tokens, all read: at ranks, so answers differ from SnapKV's, which attends at positions."""
    m, keep = model(layers=2), kvjax.method("snapkv(budget=0.5, window=4)")
    whole = kvjax.method("reattention", budget=1.0, **HYPER)
    closed = kvjax.prefill(m, PROMPTS, method=kvjax.chain(keep, whole), room=8)[1]
    apart = kvjax.prefill(m, PROMPTS, method=keep, room=8)[1]
    logits = [kvjax.step(m, cache, TOKENS[0])[0] for cache in (closed, apart)]
    assert np.isfinite(logits[0]).all() and 1e-3 < off(*logits) < 2


def test_keys_that_lie_rotated_are_refused():
    with pytest.raises(ValueError, match="compares keys before rotation, and they are stored rotated"):
        Method(read=PlacedSegments(Budget(0.5)))
        kvjax.chain(Method(read=PlacedSegments(Budget(0.5))), kvjax.method("int8"))
