"""scripts/uptraining_curve.py: what it runs, and that the page shows the data."""

import json
from pathlib import Path

import pytest

from kvjax.io.gin_bindings import load_training
from kvjax.train.settings import training

ROOT = Path(__file__).parents[1]


@pytest.fixture
def curve(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import uptraining_curve

    return uptraining_curve


@pytest.mark.parametrize(("steps", "counts"), [(4000, (40, 80, 200)), (150, (2, 3, 8)), (10, (1, 1, 1))])
def test_training_on_stops_at_every_share_that_is_asked_for(curve, steps, counts):
    assert tuple(curve.counts(steps).values()) == counts
    run = training(load_training("bytes", [f"train.steps={steps}"]), 257)
    on = curve.uptraining(run, ROOT)
    assert on.loop.steps == max(counts) and on.config is None and on.optimiser.schedule == "constant"
    evaluated = {i for i in range(1, on.loop.steps + 1) if i % on.loop.evaluate_every == 0}
    assert set(counts) <= evaluated and on.loop.log_every == on.loop.evaluate_every


def test_the_page_shows_the_data(curve):
    found = json.loads(curve.DATA.read_text())
    page = (ROOT / "docs" / "training.md").read_text()
    assert curve.table(found) in page and set(found["seeds"]) == {"train", "data"}
    for row in found["rows"].values():
        assert set(row["after"]) == {"0", "1", "2", "5"} and f"{row['scratch']:.3f}" in page
    assert "Not measured yet" in curve.table(None)
