"""Paired differences against scipy, and against what they mean."""

import numpy as np
import pytest
import scipy.stats

from kvjax.eval.report.cells import summarise
from kvjax.eval.report.duels import duels, duels_of
from kvjax.eval.report.paired import FEW, difference, mcnemar
from tests.eval.rows import comparison, scored


def answers(scores, task="get"):
    return {(task, str(i)): float(score) for i, score in enumerate(scores)}


def test_scores_of_0_and_1_get_the_exact_test_of_mcnemar(rng):
    ours, theirs = (rng.random(40) < q for q in (0.8, 0.5))
    found = difference(answers(ours), answers(theirs))
    wins, losses = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    assert (found.wins, found.losses, found.test, found.samples) == (wins, losses, "mcnemar", 40)
    assert found.p == pytest.approx(scipy.stats.binomtest(wins, wins + losses, 0.5).pvalue, rel=1e-12)
    assert found.mean == pytest.approx(ours.mean() - theirs.mean())
    assert found.low < found.mean < found.high


def test_mcnemars_p_is_counted_over_all_ways_to_win_or_lose():
    ways = [bin(i).count("1") for i in range(2**10)]
    assert mcnemar(8, 2) == pytest.approx(np.mean([min(x, 10 - x) <= 2 for x in ways]))


def test_fractional_scores_get_the_paired_bootstrap(rng):
    ours = rng.integers(0, 5, 60) / 4
    theirs = np.clip(ours - (rng.random(60) < 0.3) / 4, 0, 1)
    found = difference(answers(ours), answers(theirs))
    other = scipy.stats.bootstrap((ours - theirs,), np.mean, method="percentile", n_resamples=20000, rng=1)
    assert found.test == "bootstrap" and found.p < 0.01
    np.testing.assert_allclose((found.low, found.high), other.confidence_interval, atol=0.01)


def test_an_interval_of_differences_covers_the_truth_as_often_as_it_says(rng):
    covered = 0
    for _ in range(300):
        theirs = rng.random((2, 40)) < 0.5
        ours = np.where(rng.random((2, 40)) < 0.3, rng.random((2, 40)) < 0.8, theirs)
        both = (answers(x[0]) | answers(x[1], "all") for x in (ours, theirs))
        found = difference(*both)
        covered += found.low <= 0.3 * (0.8 - 0.5) <= found.high
    assert 0.92 <= covered / 300 <= 0.99


def test_pairs_see_what_separate_intervals_do_not():
    cells = summarise(
        [*scored([1.0] * 30 + [0.0] * 10), *scored([1.0] * 22 + [0.0] * 18, method="snapkv", budget=0.5)]
    )
    full, snapkv = cells
    assert snapkv.mean_high > full.mean_low and snapkv.versus.p < 0.01
    assert full.versus is None and snapkv.versus.mean == pytest.approx(snapkv.mean - full.mean)


def test_the_mean_difference_is_the_difference_of_the_means():
    cells = summarise(comparison())
    full = {c.protocol: c.mean for c in cells if c.reference}
    for cell in cells:
        if not cell.reference:
            assert cell.versus.mean == pytest.approx(cell.mean - full[cell.protocol])
            assert cell.versus.low <= cell.versus.mean <= cell.versus.high


def test_few_samples_get_neither_interval_nor_test():
    for count in (FEW - 1, FEW):
        found = difference(answers([1.0] * count), answers([0.0] * count))
        assert (found.p is None, found.low is None) == (count < FEW, count < FEW)
    (cell,) = summarise(scored([1.0] * 4) + scored([1.0] * 9, task="all"))
    assert cell.few and cell.tasks["get"].few and not cell.tasks["all"].few


@pytest.mark.parametrize("score", [0.5, 1.0])
def test_equal_answers_are_no_proof_of_equal_methods(score):
    found = difference(answers([score] * 20), answers([score] * 20))
    assert found.mean == 0 and found.p == 1.0 and found.low < -0.05 and found.high > 0.05


def test_figures_that_all_differ_alike_have_no_interval_and_their_signs_are_counted():
    ours, theirs = (answers([score] * 6) for score in (2.5, 2.0))
    found = difference(ours, theirs, shares=False)
    assert (found.mean, found.low, found.high, found.test) == (0.5, None, None, "mcnemar")
    assert found.p == pytest.approx(2 * 0.5**6)
    found = difference(answers([0.75] * 6), answers([0.5] * 6))
    assert found.p == pytest.approx(2 * 0.5**6) and found.low < 0.25 < found.high


def test_only_samples_of_both_count():
    assert difference(answers([1.0], "get"), answers([1.0], "all")) is None
    found = difference(answers([1.0] * 9), answers([1.0] * 6 + [0.0]))
    assert (found.samples, found.wins) == (7, 1)


def test_every_method_meets_every_other_once(rng):
    scores = {name: answers(rng.random(10) < 0.5) for name in "abc"}
    found = duels("get", scores)
    assert sorted(found.found) == [(0, 1), (0, 2), (1, 2)]
    back = difference(scores["b"], scores["a"])
    assert back.mean == -found.found[0, 1].mean and back.p == found.found[0, 1].p


def test_methods_of_one_budget_and_those_without_one_meet_in_a_protocol():
    found = {d.title: d for d in duels_of(comparison(6))}
    assert list(found) == [f"{p} · budget {b}" for p in ("agnostic", "aware") for b in (0.5, 0.25, 0.125)]
    at_half = found["aware · budget 0.5"]
    assert at_half.names == ("full", "random", "snapkv", "expected-attention", "kivi", "quest")
    cells = {(c.method, c.budget): c for c in summarise(comparison(6)) if c.protocol == "aware"}
    assert at_half.found[0, 2].mean == pytest.approx(-cells["snapkv", 0.5].versus.mean)
    assert at_half.found[0, 2].p == cells["snapkv", 0.5].versus.p
