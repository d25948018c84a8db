"""The arithmetic of a comparison against scipy and sums done by hand."""

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats

from kvjax.eval.report.cells import (
    Cell,
    NominalBudget,
    bootstrap_interval,
    score_of,
    summarise,
    wilson_interval,
)
from tests.eval.rows import row, scored


def cell_of(cells: list[Cell], method: str, budget: NominalBudget = None, protocol: str = "agnostic") -> Cell:
    (found,) = [
        c for c in cells if (c.method, repr(c.budget), c.protocol) == (method, repr(budget), protocol)
    ]
    return found


@pytest.mark.parametrize(
    ("hits", "samples"), [(0, 1), (1, 1), (0, 40), (40, 40), (1, 3), (97, 100), (511, 1000)]
)
def test_wilson_interval_equals_scipy(hits: int, samples: int) -> None:
    expected = scipy.stats.binomtest(hits, samples).proportion_ci(0.95, method="wilson")
    np.testing.assert_allclose(wilson_interval(hits / samples, samples), expected, atol=1e-12)


@pytest.mark.parametrize("samples", [8, 60, 300])
def test_bootstrap_interval_agrees_with_scipy(rng: np.random.Generator, samples: int) -> None:
    scores = rng.binomial(4, 0.7, samples) / 4
    other = scipy.stats.bootstrap((scores,), np.mean, n_resamples=20000, method="percentile", rng=1)
    one_step = 1 / (4 * samples)
    atol = one_step + 0.25 * scores.std() / math.sqrt(samples)
    np.testing.assert_allclose(bootstrap_interval(scores.tolist()), other.confidence_interval, atol=atol)


def test_bootstrap_interval_repeats_and_ignores_the_order(rng: np.random.Generator) -> None:
    scores = rng.random(50).tolist()
    assert bootstrap_interval(scores) == bootstrap_interval(sorted(scores))


@pytest.mark.parametrize(
    ("scores", "interval"),
    [
        ([1.0, 1.0, 0.0], "wilson"),
        ([1.0] * 5, "wilson"),
        ([0.5, 1.0, 0.0], "bootstrap"),
        ([0.5] * 9, "wilson"),
    ],
)
def test_the_interval_says_how_it_was_made_and_has_width(scores: list[float], interval: str) -> None:
    score = score_of(scores)
    assert score.interval == interval and score.samples == len(scores)
    assert score.mean == pytest.approx(sum(scores) / len(scores))
    assert 0 <= score.low <= score.mean <= score.high <= 1 and score.high - score.low > 0.1


def test_the_interval_of_the_mean_over_tasks_covers_the_truth_as_often_as_it_says(
    rng: np.random.Generator,
) -> None:
    truth = {"get": 0.95, "chase": 0.7, "all": 0.3}
    covered = 0
    for _ in range(400):
        cell = summarise(
            [r for t, p in truth.items() for r in scored((rng.random(60) < p).astype(float).tolist(), task=t)]
        )[0]
        covered += cell.mean_low <= sum(truth.values()) / 3 <= cell.mean_high
    assert 0.92 <= covered / 400 <= 0.985


@pytest.mark.parametrize("scores", [[1.0] * 30 + [0.0] * 10, [0.25, 1.0, 0.5, 0.75, 0.5, 0.25]])
def test_four_equal_tasks_halve_the_interval_of_one(scores: list[float]) -> None:
    one = score_of(scores)
    (cell,) = summarise([r for task in "abcd" for r in scored(scores, task=task)])
    assert cell.mean == pytest.approx(one.mean)
    assert cell.mean_low == pytest.approx(one.mean - (one.mean - one.low) / 2)
    assert cell.mean_high == pytest.approx(one.mean + (one.high - one.mean) / 2)


def test_recovery_and_worst_task_by_hand() -> None:
    rows = [
        *scored([1, 1, 1, 1], task="get"),
        *scored([1, 1, 0, 0], task="all"),
        *scored([1, 1, 0, 0], task="get", method="snapkv", budget=0.5),
        *scored([1, 0.5, 0, 0], task="all", method="snapkv", budget=0.5),
    ]
    full, snapkv = summarise(rows)
    assert (full.mean, full.recovery, full.reference) == (0.75, 1.0, True)
    assert snapkv.mean == pytest.approx((0.5 + 0.375) / 2)
    assert snapkv.recovery == pytest.approx(0.4375 / 0.75)
    assert (snapkv.worst_task, snapkv.worst_recovery) == ("get", 0.5)
    assert not snapkv.reference


def test_recovery_is_measured_within_a_protocol() -> None:
    rows = [
        *scored([1, 1], protocol="agnostic"),
        *scored([1, 0], protocol="aware"),
        *scored([1, 0], protocol="agnostic", method="h2o", budget=0.5),
        *scored([1, 0], protocol="aware", method="h2o", budget=0.5),
    ]
    cells = summarise(rows)
    assert cell_of(cells, "h2o", 0.5, "agnostic").recovery == 0.5
    assert cell_of(cells, "h2o", 0.5, "aware").recovery == 1.0


def test_recovery_compares_the_tasks_that_both_ran() -> None:
    rows = [
        *scored([1, 1], task="get"),
        *scored([0, 0], task="all"),
        *scored([1, 0], method="h2o", budget=0.5),
    ]
    assert cell_of(summarise(rows), "h2o", 0.5).recovery == 0.5


@pytest.mark.parametrize(
    "rows", [scored([1, 0], method="h2o"), [*scored([0, 0]), *scored([1, 0], method="h2o")]]
)
def test_there_is_no_recovery_without_a_full_cache_that_scores(rows: list[dict[str, Any]]) -> None:
    h2o = summarise(rows)[-1]
    assert (h2o.method, h2o.recovery, h2o.worst_task, h2o.worst_recovery) == ("h2o", None, None, None)


def test_another_baseline_can_be_chosen() -> None:
    cells = summarise([*scored([1, 0], method="int8"), *scored([1, 1])], baseline="int8")
    assert [(c.method, c.recovery, c.reference) for c in cells] == [("int8", 1.0, True), ("full", 2.0, False)]


def test_bytes_and_spans_are_means_over_samples() -> None:
    rows = [
        row(id="a", kept_bytes=10, full_bytes=100, read_bytes=5, span_kept=1.0),
        row(id="b", kept_bytes=30, full_bytes=300, read_bytes=15, span_kept=0.5),
        row(id="c", kept_bytes=50, full_bytes=200, read_bytes=25, span_kept=None),
    ]
    (cell,) = summarise(rows)
    assert (cell.kept_bytes, cell.full_bytes, cell.read_bytes) == (30, 200, 15)
    assert (cell.percent, cell.read_percent, cell.reads_less) == (15.0, 7.5, True)
    assert cell.span_kept == 0.75


def test_cells_come_baseline_first_then_by_appearance_larger_caches_first() -> None:
    rows = [
        row(method="tova", budget=0.25, kept_bytes=25),
        row(method="quest", budget=0.25, read_bytes=25),
        row(method="tova", budget=0.5, kept_bytes=50),
        row(method="quest", budget=0.5, read_bytes=50),
        row(),
    ]
    order = [(cell.method, cell.budget) for cell in summarise(rows)]
    assert order == [("full", None), ("tova", 0.5), ("tova", 0.25), ("quest", 0.5), ("quest", 0.25)]


def test_one_slot_and_the_whole_cache_are_different_budgets() -> None:
    cells = summarise([row(method="tova", budget=1, score=0.0), row(method="tova", budget=1.0)])
    assert cell_of(cells, "tova", 1).mean == 0.0 and cell_of(cells, "tova", 1.0).mean == 1.0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(), row()], "twice"),
        ([row(score=1.5)], r"score must be in \[0, 1\]"),
        ([row(score=math.nan)], r"score must be in \[0, 1\]"),
        ([row(full_bytes=0)], "full_bytes must be > 0"),
        ([row(budget=0.5), row(budget=0.25)], "one budget"),
    ],
)
def test_bad_rows_are_refused_by_name(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        summarise(rows)
    assert "full" in str(error.value)


def test_nll_is_a_mean_over_tasks_of_means_over_samples() -> None:
    fed = [{**r, "nll": nll} for r, nll in zip(scored([1, 0, 1]), (1.0, 2.0, 6.0), strict=True)]
    fed += [{**row(id="x", task="copy"), "nll": 0.5}]
    (cell,) = summarise(fed)
    assert cell.nll == pytest.approx((3.0 + 0.5) / 2) and cell.tasks["get"].nll == pytest.approx(3.0)
    # Of some samples alone it would compare with nothing.
    (some,) = summarise([*fed, row(id="y", task="copy")])
    assert some.nll is None and some.tasks["copy"].nll is None and some.tasks["get"].nll == pytest.approx(3.0)
    assert summarise([row()])[0].nll is None
