"""Scores by which chunks choose for themselves, or one after the other."""

import numpy as np
import pytest

from kvjax.keep.patterns import Recent, Sink
from kvjax.keep.scores.chunk_wise import BlockByBlock, EntropyGated, WithinChunks
from kvjax.keep.scores.score import KeyNorm
from tests.keep.test_score import B, K, check, seen_by
from tests.keep.test_score import view as view  # a fixture


@pytest.mark.rotating
def test_within_a_chunk_a_score_is_minus_the_share_that_is_no_worse(view):
    norm, pos = np.linalg.norm(np.asarray(view.k, np.float64), axis=-1), np.asarray(view.pos)
    want = np.zeros(norm.shape)
    for b, k in np.ndindex(B, K):
        live = np.flatnonzero(pos[b, k] >= 0)
        for number in np.unique(pos[b, k, live] // 3):
            mine = live[pos[b, k, live] // 3 == number]
            want[b, k, mine] = -(norm[b, k, mine][None] <= norm[b, k, mine][:, None]).mean(1)
    check(WithinChunks(KeyNorm(), 3)(view, seen_by()), want, view)


def test_within_a_chunk_protected_tokens_come_first(view):
    seen = seen_by()._replace(protect=(Recent(2),))
    got, pos = np.asarray(WithinChunks(KeyNorm(), 20)(view, seen)), np.asarray(view.pos)
    for b, k in np.ndindex(B, K):
        live = pos[b, k] >= 0
        share = 1 / live.sum()
        newest = pos[b, k] >= pos[b, k].max() - 1
        np.testing.assert_allclose(np.sort(-got[b, k][newest & live]), [share, 2 * share], rtol=1e-6)
        assert (-got[b, k][~newest & live]).min() > 2.5 * share


def test_block_by_block_the_protected_tokens_are_among_the_n(view):
    pos, length = np.asarray(view.pos), np.asarray(seen_by().length)
    seen = seen_by()._replace(protect=(Sink(1), Recent(3)))
    got = np.asarray(BlockByBlock(KeyNorm(), 2)(view, seen))
    for b, k in np.ndindex(B, K):
        newest = (pos[b, k] >= length[b] - 3) & (pos[b, k] >= 0)
        assert got[b, k][(pos[b, k] == 0) | newest].all()
        assert got[b, k].sum() == length[b] // 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WithinChunks(KeyNorm(), 0), "WithinChunks needs a whole number of tokens >= 1, got 0"),
        (lambda: BlockByBlock(KeyNorm(), -1), "BlockByBlock needs a whole number of tokens >= 1, got -1"),
        (
            lambda: EntropyGated(KeyNorm(), 4, 4),
            "of 4 tokens a spiky chunk keeps 1 or more",
        ),
    ],
)
def test_pieces_of_no_tokens_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
