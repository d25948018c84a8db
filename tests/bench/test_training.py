"""Training's benchmark: both sides of its comparison are one model, and seconds are medians."""

import sys

import pytest

from scripts.bench import timing
from scripts.bench import training as bt


def test_seconds_are_the_median_of_rounds_in_which_sides_alternate(monkeypatch):
    order, clock = [], iter((0.0, 1.0, 1.0, 3.0, 3.0, 6.0, 6.0, 8.0, 8.0, 9.0, 9.0, 11.0))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    sides = {name: lambda name=name: order.append(name) or 0.0 for name in ("a", "b")}
    assert timing.median_in_turn(sides, 3) == {"a": 1.0, "b": 2.0}  # seconds 1, 3, 1 and 2, 2, 2
    assert order == ["a", "b"] * 3


@pytest.mark.rotating
def test_a_step_in_torch_says_the_loss_of_ours_and_learns_alike():
    pytest.importorskip("torch")
    from scripts.bench.torch_decoder import Theirs

    ours = bt.Ours("bytes", 2, 32)
    theirs = Theirs(ours.config, ours.params, ours.tokens, ours.optimiser, 1)
    for _ in range(3):
        assert theirs.step() == pytest.approx(ours.step(), abs=2e-4)
    assert "torch" in sys.modules
