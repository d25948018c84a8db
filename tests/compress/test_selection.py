"""What leaves after a token: exactly one slot of a KV head beyond its budget, whatever the compiler does."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.compress.selection import _worst
from kvjax.keep.budgets.budget import Uniform
from tests.float64.reference import best
from tests.methods.battery import model


@pytest.mark.rotating
def test_every_step_leaves_as_many_slots_as_the_budget_holds():
    """Without optimisation, XLA for CPUs computes scores of this text twice and rounds them differently."""
    text = [54, 40, 32, 17, 19, 2, 4, 1, 5, 19, 30, 27, 25, 1, 0, 7, 0, 42, 33]
    logits, cache = kvjax.prefill(model("4/2"), [text], method="a2sf(budget=0.5, forgetting=0.7)", room=8)
    for length in range(len(text) + 1, len(text) + 7):
        logits, cache = kvjax.step(model("4/2"), cache, [int(np.argmax(logits[0]))])
        held = {int(n) for layer in kvjax.kept_positions(cache) for n in (layer >= 0).sum(-1).ravel()}
        assert held == {length // 2}


def test_the_lowest_score_leaves_and_the_newest_of_equal_ones(rng):
    score = rng.integers(0, 4, (3, 2, 9)).astype(np.float32)
    pos = np.stack([rng.permuted(np.arange(-2, 7)) for _ in range(6)]).reshape(3, 2, 9).clip(-1)
    score[0, 0] = np.inf  # all are protected: the newest leaves
    n = np.array([6, 6, 7])
    keep = kvjax.method("h2o(budget=6)").keep
    assert isinstance(keep.allocate, Uniform)
    gone = np.asarray(
        _worst(keep, jnp.asarray(score), jnp.asarray(pos, jnp.int32), jnp.asarray(n, jnp.int32))
    )
    for row in range(3):
        for s, at, found in zip(score[row], pos[row], gone[row], strict=True):
            live = np.flatnonzero(at >= 0)
            live = live[np.argsort(at[live])]
            want = live[~best(s[live].astype(float), len(live) - 1)] if len(live) > n[row] else []
            assert np.flatnonzero(found).tolist() == list(want)
