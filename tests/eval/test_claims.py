"""What the numbers of `compare` must show, on three seeds of the small model and 200 samples or more.

Slow: about five minutes. `pytest -m slow tests/eval/test_claims.py`.
"""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import kvjax
from kvjax.eval.compare import compare
from tests.compilation import optimised

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("claims")]
QUIET = Console(file=StringIO(), width=140)
SEEDS = Path(__file__).parents[1] / "fixtures" / "recall_seeds"
METHODS = ["snapkv:variant=kvpress", "h2o", "kvzip", "int8", "int4"]


@pytest.fixture(scope="module", autouse=True)
def fast_programs():
    with optimised(True):
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One comparison per seed."""
    models = sorted(str(p) for p in SEEDS.iterdir())
    assert len(models) == 3
    return [
        compare(
            model=model, methods=METHODS, budgets=[0.5, 0.25], samples=72,
            protocols=("agnostic", "aware-unprotected"),
            out=tmp_path_factory.mktemp("claims") / str(i), console=QUIET,
        )
        for i, model in enumerate(models)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def cells(runs):
    """Collect (method, budget, protocol) -> {task: mean score over the seeds}."""
    found = {}
    for cell in (cell for run in runs for cell in run.cells):
        for task, score in cell.tasks.items():
            found.setdefault((cell.method, cell.budget, cell.protocol), {}).setdefault(task, []).append(
                score.mean
            )
    return {key: {t: float(np.mean(s)) for t, s in tasks.items()} for key, tasks in found.items()}


def get(cells, method, budget, protocol):
    return cells[method, budget, protocol]["get"]


def test_the_full_cache_reaches_the_bars_of_the_shipped_model(cells):
    for protocol in ("agnostic", "aware-unprotected"):
        full = cells["full", None, protocol]
        assert full["get"] >= 0.97 and full["chase"] >= 0.9 and full["all"] >= 0.85 and full["copy"] >= 0.9


def test_snapkv_that_knows_the_question_beats_the_anchors_and_h2o_on_retrieval(cells):
    snap = get(cells, "snapkv:variant=kvpress", 0.25, "aware-unprotected")
    middle = [get(cells, m, 0.25, "aware-unprotected") for m in ("sink-recent", "h2o")]
    assert snap > max(middle) and min(middle) > get(cells, "random", 0.25, "aware-unprotected")


def test_snapkv_loses_25_points_when_the_question_comes_after_compression(cells):
    aware, agnostic = (
        get(cells, "snapkv:variant=kvpress", 0.25, p) for p in ("aware-unprotected", "agnostic")
    )
    assert aware - agnostic >= 0.25


def test_kvzip_keeps_what_nobody_has_asked_about_yet(cells):
    assert get(cells, "kvzip", 0.5, "agnostic") >= 0.70


def test_sink_recent_answers_about_its_window_and_nothing_else(runs):
    for budget in (0.5, 0.25):
        rows = [
            row for run in runs for row in run.rows
            if (row["method"], row["budget"], row["protocol"], row["task"])
            == ("sink-recent", budget, "agnostic", "get")
        ]  # fmt: skip
        inside, outside = ([r["score"] for r in rows if r["span_kept"] == kept] for kept in (1, 0))
        assert min(len(inside), len(outside)) > 30
        assert np.mean(inside) >= 0.9 and np.mean(outside) <= 0.1


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_quantised_caches_stay_within_three_points_of_the_full_cache(cells, method):
    for protocol in ("agnostic", "aware-unprotected"):
        for task, score in cells["full", None, protocol].items():
            assert cells[method, None, protocol][task] >= score - 0.03, (protocol, task)


def test_retrieval_holds_at_1920_tokens(tmp_path):
    run = compare(
        methods=[], tasks=["get"], samples=40, length=1925, protocols=("agnostic",), out=tmp_path / "long",
        budgets=[0.5], console=QUIET,
    )  # fmt: skip
    full = next(c for c in run.cells if c.method == "full")
    assert full.tasks["get"].mean >= 0.95
    assert kvjax.load("recall-tiny").config.max_positions >= 2048
