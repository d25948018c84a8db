"""Paired differences: two methods answered the same questions, so each question is its own comparison.

Overlapping intervals say little about two methods on the same samples; paired differences do. They are paired
by task and sample. Tasks have equal weights, as in the mean of a cell, and are taken as independent.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

# Below this many samples an interval or a test depends more on its formula than on the method.
FEW = 5
RESAMPLES = 2000
_SEED = 0
_TAIL = 0.025
_OUT = round(_TAIL * RESAMPLES)
_Z = NormalDist().inv_cdf(1 - _TAIL)


@dataclass(frozen=True)
class Difference:
    """How much higher one method scores than another on the samples of both, in the scores' own unit.

    mean: mean over tasks of the mean difference. low, high: its 95% interval; p: the chance of such a
    difference, of either sign, between equals; all three None below 5 samples of a task. wins, losses:
    samples that scored higher, and lower. test: `mcnemar` (exact, on wins and losses; interval of Bonett and
    Price, 2012) for scores of 0 and 1 and where all samples differ alike, `bootstrap` (paired, within tasks,
    fixed seed) for others. Figures without bounds that all differ alike have no interval.
    """

    mean: float
    low: float | None
    high: float | None
    p: float | None
    wins: int
    losses: int
    samples: int
    test: Literal["mcnemar", "bootstrap"]


# The scores of one method by (task, sample).
Scores = Mapping[tuple[str, str], float]


def scores_of(rows: Iterable[Mapping[str, Any]]) -> Scores:
    """Return the scores of one method's rows, by task and sample."""
    return {(row["task"], str(row["id"])): float(row["score"]) for row in rows}


def difference(ours: Scores, theirs: Scores, *, shares: bool = True) -> Difference | None:
    """Compute the mean difference of `ours` from `theirs` on their common samples; None if there are none.

    shares: scores are in [0, 1]; False for figures without bounds, such as nats.

    >>> right, wrong = ({("get", str(i)): score for i in range(8)} for score in (1.0, 0.0))
    >>> found = difference(right, wrong)
    >>> found.mean, found.wins, found.test, round(found.p, 4)  # p: 2 of the 2**8 ways to win or lose
    (1.0, 8, 'mcnemar', 0.0078)
    """
    tasks: dict[str, list[tuple[float, float]]] = {}
    # Sorted, so that the same samples give the same interval in whatever order they were written.
    for key in sorted(ours.keys() & theirs.keys()):
        tasks.setdefault(key[0], []).append((ours[key], theirs[key]))
    if not tasks:
        return None
    pairs = [np.array(found) for found in tasks.values()]
    gains = [x[:, 0] - x[:, 1] for x in pairs]
    wins, losses = (sum(int((sign * x > 0).sum()) for x in gains) for sign in (1, -1))
    binary = shares and all(np.isin(x, (0.0, 1.0)).all() for x in pairs)
    # Equal differences leave nothing to resample: their signs are counted instead. Shares get the widest
    # interval for their mean, unbounded figures none.
    alike = all((x == x[0]).all() for x in gains)
    mean = math.fsum(float(x.mean()) for x in gains) / len(gains)
    low = high = p = None
    if min(map(len, gains)) >= FEW:
        draws = None if binary or alike else _draws(gains)
        p = mcnemar(wins, losses) if draws is None else _chance(draws)
        if draws is not None:
            low, high = float(draws[_OUT]), float(draws[~_OUT])
        elif shares:
            low, high = _in_closed_form(gains)
    samples, test = sum(map(len, gains)), "mcnemar" if binary or alike else "bootstrap"
    return Difference(mean, low, high, p, wins, losses, samples, test)


def _in_closed_form(gains: Sequence[Float[np.ndarray, "N"]]) -> tuple[float, float]:
    """Compute a 95% interval of the mean over tasks: Bonett and Price's in each task, combined by MOVER.

    gains: the differences of N samples for each task, each in [-1, 1].
    """
    means = [float(x.mean()) for x in gains]
    ends = [_price(float(x[x > 0].sum()), float(-x[x < 0].sum()), len(x)) for x in gains]
    mean = math.fsum(means) / len(means)
    # MOVER (Zou and Donner, 2008): distances to the ends of intervals add like standard deviations.
    below = math.hypot(*(m - low for m, (low, _) in zip(means, ends, strict=True))) / len(means)
    above = math.hypot(*(high - m for m, (_, high) in zip(means, ends, strict=True))) / len(means)
    return float(max(-1.0, mean - below)), float(min(1.0, mean + above))


def _price(wins: float, losses: float, samples: int) -> tuple[float, float]:
    """Compute a 95% interval of a mean paired difference (Bonett and Price, 2012), which covers the mean.

    wins, losses: the sums of the positive differences and of the negative ones, without their signs.
    """
    up, down = (wins + 1) / (samples + 2), (losses + 1) / (samples + 2)
    half = _Z * math.sqrt((up + down - (up - down) ** 2) / (samples + 2))
    mean = (wins - losses) / samples
    return float(min(mean, max(-1.0, up - down - half))), float(max(mean, min(1.0, up - down + half)))


@cache
def mcnemar(wins: int, losses: int) -> float:
    """Compute the exact two-sided p of McNemar's test: equals win and lose with the same chance.

    >>> mcnemar(1, 9), mcnemar(0, 0)
    (0.021484375, 1.0)
    """
    # `scipy.special` takes as long to import as all methods.
    from scipy.special import bdtr

    # A two-sided sign test. `scipy.stats` has one, but takes 0.5 s more to import.
    return min(1.0, 2 * float(bdtr(min(wins, losses), wins + losses, 0.5)))


def _draws(gains: Sequence[Float[np.ndarray, "N"]]) -> Float[np.ndarray, "R"]:
    """Compute the mean over tasks of R resamples, sorted; samples are drawn anew within every task."""
    return np.sort(sum(_weights(len(x), task) @ x for task, x in enumerate(gains)) / len(gains))


def _chance(draws: Float[np.ndarray, "R"]) -> float:
    """Compute p as twice the share of resamples on the side of 0 with fewer of them, but never as 0."""
    beyond = min(int((draws <= 0).sum()), int((draws >= 0).sum()))
    return min(1.0, 2 * (beyond + 1) / (RESAMPLES + 1))


@cache
def _weights(samples: int, task: int) -> Float[np.ndarray, "R N"]:
    """Return the weight of each sample in each resample; the same for every pair of methods."""
    draws = np.random.default_rng([_SEED, task]).multinomial(
        samples, np.full(samples, 1 / samples), RESAMPLES
    )
    return draws / samples
