"""The curve of training on: what is run for it."""

from pathlib import Path

import pytest

from kvjax.io.gin_bindings import load_training
from kvjax.train.settings import training
from scripts.studies import uptraining_curve as curve


@pytest.mark.parametrize(("steps", "counts"), [(4000, (40, 80, 200)), (150, (2, 3, 8)), (10, (1, 1, 1))])
def test_training_on_stops_at_every_share_that_is_asked_for(steps, counts):
    assert tuple(curve.counts(steps).values()) == counts
    run = training(load_training("bytes", [f"train.steps={steps}"]), 257)
    on = curve.uptraining(run, Path())
    assert on.loop.steps == max(counts) and on.config is None and on.optimiser.schedule == "constant"
    evaluated = {i for i in range(1, on.loop.steps + 1) if i % on.loop.evaluate_every == 0}
    assert set(counts) <= evaluated and on.loop.log_every == on.loop.evaluate_every


def test_a_table_without_data_says_what_makes_it():
    assert "Not measured yet: `python -m scripts.studies.uptraining_curve train`" in curve.table({})
    assert set(curve.DATA.read()["seeds"]) == {"train", "data"}
