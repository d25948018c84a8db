"""Two stages: how many slots the first one chooses beside what is protected."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.grammar.kinds import View
from kvjax.keep.algebra import Pool, Word, stage
from kvjax.keep.patterns import Recent, Sink
from tests.keep.test_score import seen_by
from tests.methods.recorded import model

WINDOW, SINKS = 4, 2


@dataclasses.dataclass(frozen=True)
class Older(Word):
    """Larger for older tokens, 0 in the window."""

    def __call__(self, view, seen):
        older = view.pos < (seen.length - WINDOW)[:, None, None]
        return jnp.where(older, 100.0 - view.pos.astype(jnp.float32), 0.0)


def first_stage(n, share, whole, score=Older()):  # noqa: B008 (a frozen word)
    """Per row, the positions that the first stage chooses; rows hold 24 and 17 of 24 slots."""
    lengths = np.array([24, 17])
    pos = np.where(np.arange(24) < lengths[:, None], np.arange(24), -1)[:, None]
    view = View(jnp.zeros((2, 1, 24, 1)), jnp.zeros((2, 1, 24, 1)), jnp.asarray(pos, jnp.int32), None, {})
    seen = seen_by(length=lengths)._replace(
        n=jnp.full(2, n, jnp.int32), protect=(Sink(SINKS), Recent(WINDOW))
    )
    got = np.asarray(stage(score, share, 0.0 * Older(), whole)(view, seen))
    return [np.flatnonzero(row[0] == np.inf).tolist() for row in got]


@pytest.mark.parametrize(
    ("n", "share", "whole", "want"),
    [
        (12, 0.5, False, 3),  # of 12 - 6
        (8, 0.5, False, 1),  # of 8 - 6: less than two windows and the sinks
        (6, 1.0, False, 0),  # nothing is left
        (5, 1.0, False, 0),  # less than nothing
        (40, 0.5, False, 17),  # more than there is, in the second row
        (12, 0.75, True, 3),  # 9 - 6
        (12, 0.5, True, 0),  # 6 - 6
        (8, 0.5, True, 0),  # 4 - 6
    ],
)
def test_first_stage_beside_protected_slots_has_its_share(n, share, whole, want):
    older = [np.arange(SINKS, length - WINDOW)[:want].tolist() for length in (24, 17)]
    assert first_stage(n, share, whole) == older


def test_first_stage_of_pooled_scores_leaves_out_protected_slots():
    """Smoothing gives the oldest slots of the window, and here all of it, what their neighbours have."""
    assert first_stage(12, 0.5, False, Older() >> Pool(9)) == [[2, 3, 4], [2, 3, 4]]
    assert first_stage(12, 0.5, False, -1.0 * Older() >> Pool(3)) == [[19, 18, 17][::-1], [12, 11, 10][::-1]]


@pytest.mark.rotating
def test_nacl_where_the_window_is_half_of_the_budget_draws():
    """Of 128 slots, 68 are protected, and of the 60 others two seeds have 37 in common at least."""
    row = np.random.default_rng(0).integers(0, 64, 256).tolist()
    kept = []
    for seed in range(2):
        method = kvjax.method("nacl", budget=128, window=64, seed=seed)
        _, cache = kvjax.prefill(model(), [row], method=method)
        lists = np.asarray(kvjax.kept_positions(cache)[0])[0]
        kept.append([set(pos[pos >= 0].tolist()) for pos in lists])
    for one, other in zip(*kept, strict=True):
        assert len(one) == len(other) == 128 and 68 + 37 <= len(one & other) < 128
