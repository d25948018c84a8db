"""Claims on the board of a real model: what counts as better and as near, and what is not compared."""

import math

import numpy as np
import pytest

from scripts.studies import board, real_claims
from scripts.studies.claims_table import CLAIMS, Better, Claim, Learned, Near, Untestable


def lines(method, nll, budget=0.25, protocol="agnostic", tasks=("vt", "fwe"), kept=0.25, seed=0):
    """Make the board's lines of a cell, with the same nats per context in every task."""
    one = dict(method=method, budget=budget, protocol=protocol, kept=kept, seed=seed, nll=list(nll))
    return [{**one, "task": task} for task in tasks]


FULL = np.linspace(0.1, 0.9, 8)
NOISE = np.array([0.01, -0.01, 0.02, -0.02, 0.0, 0.01, -0.01, 0.0])


def verdict(claim, *found):
    return real_claims.check(claim, [line for some in found for line in some]).verdict


@pytest.mark.parametrize(("more", "holds"), [(-0.3, "yes"), (0.3, "no"), (0.0, "unclear")])
def test_better_is_likelier_beyond_the_interval(more, holds):
    claim = Claim("keydiff", "", Better("tova", (0.25,), "agnostic"))
    assert verdict(claim, lines("keydiff", FULL + more + NOISE), lines("tova", FULL)) == holds


def test_bytes_of_both_are_shown_where_they_differ():
    claim = Claim("quest", "", Better("h2o", (0.25,), "agnostic"))
    found = real_claims.check(claim, [*lines("quest", FULL, kept=1.07), *lines("h2o", FULL + 1 + NOISE)])
    assert found.verdict == "yes" and found.numbers.endswith("107% of the bytes, h2o keeps 25%")


@pytest.mark.parametrize(("times", "holds"), [(0.99, "yes"), (0.9, "no"), (0.95, "unclear")])
def test_near_is_a_share_of_the_likelihood_of_each_token(times, holds):
    ours = lines("keydiff", FULL - math.log(times) + NOISE)
    assert verdict(Claim("keydiff", "", Near((0.25,))), ours, lines("full", FULL, None)) == "not compared yet"
    near = Claim("keydiff", "", Near((0.25,), protocol="agnostic"))
    assert verdict(near, ours, lines("full", FULL, None)) == holds
    heavy = Claim("keydiff", "", Near((0.25,), protocol="agnostic", percent=20))
    assert verdict(heavy, ours, lines("full", FULL, None)) == "no"


def test_figures_are_paired_by_context_and_means_over_budgets():
    half, quarter = lines("keydiff", FULL + 0.2, 0.5), lines("keydiff", FULL + 0.4 + NOISE, 0.25)
    found = real_claims.losses([*half, *quarter], "keydiff", (0.5, 0.25), {"vt", "fwe"})
    want = {("vt", f"0-{i:04}"): x for i, x in enumerate(FULL + 0.3 + NOISE / 2)}
    assert len(found) == 16 and {k: found[k] for k in want} == pytest.approx(want)
    # A context of another seed is another one; a method without budgets has one figure for all.
    other = real_claims.losses(lines("full", FULL, None, seed=1), "full", (0.5, 0.25), {"vt", "fwe"})
    assert len(other) == 16 and not found.keys() & other.keys()


def test_what_lacks_a_task_a_budget_or_contexts_is_not_judged():
    claim, tova = Claim("keydiff", "", Better("tova", (0.25,), "agnostic")), lines("tova", FULL)
    assert verdict(claim, lines("keydiff", FULL, tasks=("vt",)), tova) == "not compared yet"
    assert verdict(claim, lines("keydiff", FULL, 0.5), tova) == "not compared yet"
    assert verdict(claim, lines("keydiff", FULL[:3]), lines("tova", FULL[:3] + 1)) == "unclear"
    assert verdict(Claim("a", "", Learned())) == verdict(Claim("a", "", Untestable("why"))) == "not testable"


def test_a_row_for_every_claim_and_a_count_of_all():
    text = real_claims.section(board.at_1024())
    rows = [line for line in text.splitlines() if line.startswith("| ") and " | claim | " not in line]
    assert len(rows) == len(CLAIMS) and text.startswith(f"Of {len(CLAIMS)} claims ")
    compared, rest = text.split("<details>")
    assert "not compared yet**" not in compared and "**yes**" in compared and "**yes**" not in rest
