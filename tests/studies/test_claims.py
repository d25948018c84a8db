"""docs/claims.md: how a claim is judged, and that all of them can be."""

import dataclasses
import math
import re

import pytest

from kvjax.commands.main import make_parser
from kvjax.eval.report.leaderboard import Leaderboard, Line, Speed, read_leaderboard
from kvjax.methods import METHODS, takes_budget
from scripts.studies import claims, claims_table, moved
from tests.eval.test_leaderboard import board  # noqa: F401


def line(
    method: str, *models: float, half: float = 0.02, budget: float | None = 0.25, few: bool = False
) -> Line:
    mean = sum(models) / len(models)
    return Line(
        method, budget, "aware-unprotected", mean, mean - half, mean + half, 25.0, 25.0, {}, models, few
    )


def test_a_difference_has_the_ends_of_two_independent_means():
    found = claims.difference([(line("a", 0.5, 0.7), line("b", 0.4, 0.4, half=0.03))])
    assert found.mean == pytest.approx(0.2) and found.models == pytest.approx((0.1, 0.3))
    assert (found.low, found.high) == pytest.approx(
        (0.2 - math.hypot(0.02, 0.03), 0.2 + math.hypot(0.02, 0.03))
    )
    # Two budgets in the mean: half of each, and narrower.
    both = claims.difference([(line("a", 0.5), line("b", 0.4)), (line("a", 0.9), line("b", 0.6))])
    assert both.mean == pytest.approx(0.2) and both.high - both.mean == pytest.approx(
        math.hypot(*[0.02] * 4) / 2
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "least", "verdict"),
    [
        ((0.6, 0.7), (0.4, 0.4), 0.0, "yes"),
        ((0.4, 0.4), (0.6, 0.7), 0.0, "no"),
        ((0.8, 0.39), (0.4, 0.4), 0.0, "unclear"),  # better in the mean, not on every model
        ((0.41, 0.41), (0.4, 0.4), 0.0, "unclear"),  # on every model, within the interval
        ((0.39, 0.39), (0.4, 0.4), -0.05, "yes"),  # no more than 5 points less
        ((0.3, 0.3), (0.4, 0.4), -0.05, "no"),
    ],
)
def test_a_claim_holds_on_every_model_and_beyond_the_interval(ours, theirs, least, verdict):
    found = claims.difference([(line("a", *ours), line("b", *theirs))])
    assert claims.judged(found, least) == verdict


class Board(Leaderboard):
    """A leaderboard of given lines."""

    given: list[Line]

    def lines(self, methods=()):
        return self.given


def with_lines(*lines: Line, speed=None) -> Board:
    made = Board((), speed or {}, {})
    made.given = list(lines)
    return made


def test_what_was_not_compared_or_with_too_few_samples_is_not_judged():
    claim = claims.Claim("h2o", "", claims.Better("sink-recent", (0.25,)))
    ours, theirs = line("h2o", 0.9), line("sink-recent", 0.1)
    assert claims.check(claim, with_lines(ours, theirs)).verdict == "yes"
    assert "bytes" not in claims.check(claim, with_lines(ours, theirs)).numbers
    lighter = claims.check(claim, with_lines(ours, theirs._replace(percent=20.0)))
    assert lighter.numbers.endswith("25% of the bytes, sink-recent keeps 20%")
    assert claims.check(claim, with_lines(ours)).verdict == "not compared yet"
    assert claims.check(claim, with_lines(ours, theirs._replace(few=True))).verdict == "unclear"
    near = claims.Claim("h2o", "", claims.Near((0.25,)))
    assert claims.check(near, with_lines(ours, line("full", 0.92, budget=None))).verdict == "yes"
    assert claims.check(near, with_lines(line("h2o", 0.5), line("full", 0.92, budget=None))).verdict == "no"
    lighter = claims.Claim("h2o", "", claims.Near((0.25,), percent=20))
    found = claims.check(lighter, with_lines(ours, line("full", 0.92, budget=None)))
    assert found.verdict == "no" and found.numbers.endswith("25% of the bytes")
    fast = claims.Claim("fastkv", "", claims.Faster())
    assert claims.check(fast, with_lines(speed={"fastkv": Speed(0.8, 1.0)})).verdict == "yes"
    assert claims.check(fast, with_lines(speed={"fastkv": Speed(1.2, 1.0)})).verdict == "no"
    needs_fit = claims.Claim("kvzap", "", claims.Near())
    assert "fitted" in claims.check(needs_fit, with_lines()).numbers


def test_a_claim_about_memory_tokens_is_judged_by_the_models_that_learned_with_them():
    def cell(mean, half):
        return dict(mean=mean, mean_low=mean - half, mean_high=mean + half, kept_bytes=1.0, full_bytes=4.0)

    def found(mean, half=0.01):
        return claims.learned("loma", 0.05, {"loma": {"own": cell(mean, half), "start": cell(0.9, 0.0)}})

    assert (
        found(0.88).verdict == "yes" and found(0.8).verdict == "no" and found(0.88, 0.1).verdict == "unclear"
    )
    assert found(0.88).numbers == "-2.0 [-3.0, -1.0]; one model; 25% of the bytes"
    two = {"own": cell(0.88, 0.01), "start": cell(0.9, 0.0), "seeds": {"1": {"own": cell(0.84, 0.02)}}}
    both = claims.learned("loma", 0.05, {"loma": two})
    assert both.verdict == "unclear" and both.numbers.startswith("-4.0 [-8.0, -1.0]; 2 models")
    assert claims.learned("loma", 0.05, {}).verdict == "not compared yet"


def test_a_claim_about_longer_texts_is_judged_by_every_model_that_read_them():
    def model(own, half):
        difference = {"nll": own - 4.0, "low": own - 4.0 - half, "high": own - 4.0 + half}
        return {"within": {"full": 2.5}, "homer": {"own": own, "full": 4.0, "difference": difference}}

    def verdict(*models):
        return claims.longer("homer", list(models)).verdict

    assert verdict(model(3.0, 0.5), model(3.5, 0.4)) == "yes" and verdict(model(5.0, 0.5)) == "no"
    assert verdict(model(3.0, 0.5), model(3.5, 0.6)) == verdict(model(3.0, 0.5), model(5.0, 0.5)) == "unclear"
    assert verdict() == "not compared yet"
    numbers = claims.longer("homer", [model(3.0, 0.5), model(3.5, 0.4)]).numbers
    assert numbers == "bits per byte 3.00, 3.50; full cache 4.00, 4.00, and 2.50, 2.50 within that length"


def test_every_claim_names_cells_that_a_comparison_of_all_methods_has():
    for claim in claims.CLAIMS:
        test = claim.test
        assert claim.method in METHODS and claim.says and not claim.says.endswith(".")
        if isinstance(test, claims.Better | claims.Near):
            assert test.other in METHODS and set(test.budgets) <= {0.5, 0.25, 0.125, None}
            for budget in test.budgets:
                assert (budget is None) == (not takes_budget(claim.method)), claim
            assert test.other == "full" or takes_budget(test.other) == (None not in test.budgets), claim
    assert sum(not isinstance(c.test, claims.Untestable) for c in claims.CLAIMS) >= 40


def test_the_commands_are_commands():
    parser = make_parser()
    shown = [claims.command(claim) for claim in claims.CLAIMS]
    for command in filter(None, shown):
        if command.startswith("kvjax "):
            args = parser.parse_args(command.split()[1:])
            assert args.methods and args.samples == 100
    assert sum(command.startswith("kvjax ") for command in shown) > 40


def test_a_page_says_what_its_data_says(board):  # noqa: F811
    runs = [
        run._replace(cells=tuple(
            dataclasses.replace(cell, protocol=claims_table.AWARE) if cell.protocol == "aware" else cell
            for cell in run.cells
        ))
        for run in board[0].runs
    ]  # fmt: skip
    text = claims.page(board[0]._replace(runs=tuple(runs)), [])
    assert re.search(r"\| quest \|.*\*\*(yes|no|unclear)\*\*", text) and "(`a`, `b`)" in text


def test_claims_on_methods_measured_in_another_form_are_marked_and_notes_are_shown():
    assert set(moved.MOVED) <= set(METHODS)
    text = claims.page(read_leaderboard(), [])
    lines = {line.split("|")[2].strip(): line for line in text.splitlines() if line.count("|") == 7}
    assert "| † " in lines["better than ChunkKV at aggressive budgets"]  # What it is compared with changed.
    assert "†" not in lines["better than H2O at equal budgets"]
    assert "fitted on these tasks" in lines["budgets by what heads retrieve are better than Ada-KV's"]
    for says in (
        "merging values is better than dropping them",
        "better than methods that do not ask with the instruction, at equal memory",
        "what is old is better pooled than dropped",
    ):
        assert "**not testable**" in lines[says]
    assert moved.changes(["h2o"]) == "" and "citrus: half of the slots" in moved.changes(["h2o", "citrus"])


def test_every_method_below_random_is_explained():
    """A fault of our form is mended; what stays below random is the method's own, and the page says why."""
    lines = read_leaderboard().lines()
    ours = {id for surprise in claims.SURPRISES for id in surprise.methods}
    random = {(line.protocol, line.budget): line.low for line in lines if line.method == "random"}
    below = {line.method for line in lines if line.high < random.get((line.protocol, line.budget), 0)}
    assert below and below <= ours, sorted(below - ours)
