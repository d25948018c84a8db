"""scripts/bench_training.py: both sides of its comparison are one model, and its speeds are medians."""

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_speed_is_tokens_over_the_median_second_of_rounds_that_alternate(monkeypatch):
    import bench_training as bt

    order, clock = [], iter((0.0, 1.0, 1.0, 3.0, 3.0, 6.0, 6.0, 8.0, 8.0, 9.0, 9.0, 11.0))
    monkeypatch.setattr(bt.time, "perf_counter", lambda: next(clock))
    sides = {name: lambda name=name: order.append(name) or 0.0 for name in ("a", "b")}
    assert bt.timed(sides, 3, 60) == {"a": 60.0, "b": 30.0}  # seconds 1, 3, 1 and 2, 2, 2
    assert order == ["a", "b"] * 3


@pytest.mark.rotating
def test_a_step_in_torch_says_the_loss_of_ours_and_learns_alike():
    pytest.importorskip("torch")
    import bench_training as bt
    from torch_decoder import Theirs

    ours = bt.Ours("bytes", 2, 32)
    theirs = Theirs(ours.config, ours.params, ours.tokens, ours.optimiser, 1)
    for _ in range(3):
        assert theirs.step() == pytest.approx(ours.step(), abs=2e-4)
    assert "torch" in sys.modules
