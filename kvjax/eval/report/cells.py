"""The arithmetic of a comparison: from one row per sample to one cell per (method, budget, protocol).

Plain values in, plain values out. Scores, recoveries and interval ends are shares in [0, 1], sizes are bytes.
How the cells are shown belongs in `comparison_table.py`, `frontier.py` and `page.py`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from kvjax.eval.report.paired import FEW, Difference, Scores, difference, scores_of

NominalBudget = float | int | None
Row = Mapping[str, Any]

CONFIDENCE = 0.95
RESAMPLES = 2000
_SEED = 0
_Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


@dataclass(frozen=True)
class MeanScore:
    """The mean score of one task with its 95% interval; `interval` says how the interval was made.

    `wilson` for scores that are all 0 or 1, `bootstrap` (percentile, fixed seed) for fractional ones. `few`:
    there are too few samples for the interval to be shown. nll: the mean of -log p of right answers, in nats
    per token; None if it was not measured of every sample.
    """

    mean: float
    low: float
    high: float
    samples: int
    interval: Literal["wilson", "bootstrap"]
    nll: float | None = None

    @property
    def few(self) -> bool:
        return self.samples < FEW


@dataclass(frozen=True)
class Cell:
    """What was measured for one method at one budget under one protocol.

    mean, mean_low, mean_high: unweighted mean over tasks and its 95% interval, tasks taken as independent.
    recovery: mean / mean of the full cache on the same tasks; None without one, or if it scores 0.
    worst_task, worst_recovery: the task with the smallest score / full-cache score.
    kept_bytes, full_bytes, read_bytes: means over samples; read_bytes is what one decode step reads.
    host_bytes: those of kept_bytes that are in host memory.
    nll: mean over tasks of `MeanScore.nll`; None if a task has none.
    span_kept: mean share of the needed span that survived; None if no task names its span.
    reference: whether this is the full cache that recovery is measured against.
    versus: the paired difference to it; None without one, and for itself.
    """

    method: str
    budget: NominalBudget
    protocol: str
    tasks: dict[str, MeanScore]
    mean: float
    mean_low: float
    mean_high: float
    kept_bytes: float
    full_bytes: float
    read_bytes: float
    span_kept: float | None
    recovery: float | None = None
    worst_task: str | None = None
    worst_recovery: float | None = None
    reference: bool = False
    versus: Difference | None = None
    host_bytes: float = 0.0
    nll: float | None = None

    @property
    def few(self) -> bool:
        """Whether a task has too few samples for intervals to be shown."""
        return any(score.few for score in self.tasks.values())

    @property
    def percent(self) -> float:
        """Bytes kept, in percent of the full cache."""
        return 100.0 * self.kept_bytes / self.full_bytes

    @property
    def host_percent(self) -> float:
        """Bytes kept in host memory, in percent of the full cache."""
        return 100.0 * self.host_bytes / self.full_bytes

    @property
    def read_percent(self) -> float:
        """Bytes read per decode step, in percent of the full cache."""
        return 100.0 * self.read_bytes / self.full_bytes

    @property
    def reads_less(self) -> bool:
        """Whether a decode step reads clearly less (by 5% or more) than the method keeps."""
        return self.read_bytes <= 0.95 * self.kept_bytes


def budget_label(budget: NominalBudget) -> str:
    """Write a budget as text: a share of the tokens, slots per head, or a dash if a method has none.

    >>> budget_label(0.25), budget_label(64), budget_label(None)
    ('0.25', '64 slots', '–')
    """
    if budget is None:
        return "–"
    return f"{budget} slots" if isinstance(budget, int) else f"{budget:.4g}"


def wilson_interval(mean: float, samples: int) -> tuple[float, float]:
    """Compute the 95% Wilson score interval of a proportion.

    >>> low, high = wilson_interval(0.5, 100)
    >>> round(low, 3), round(high, 3)
    (0.404, 0.596)
    """
    shrink = 1.0 + _Z**2 / samples
    centre = (mean + _Z**2 / (2 * samples)) / shrink
    half = _Z / shrink * math.sqrt(mean * (1.0 - mean) / samples + _Z**2 / (4 * samples**2))
    return max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))


def bootstrap_interval(scores: Sequence[float]) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval of a mean: 2000 resamples, fixed seed, same for any order.

    >>> low, high = bootstrap_interval([0.25, 0.5, 0.75, 0.5])
    >>> 0.25 <= low < 0.5 < high <= 0.75
    True
    """
    values, counts = np.unique(np.asarray(scores, np.float64), return_counts=True)
    draws = np.random.default_rng(_SEED).multinomial(len(scores), counts / len(scores), size=RESAMPLES)
    tail = (1.0 - CONFIDENCE) / 2
    low, high = np.quantile(draws @ values / len(scores), [tail, 1.0 - tail])
    return float(low), float(high)


def score_of(scores: Sequence[float]) -> MeanScore:
    """Compute the mean of one task's scores with the interval that fits them.

    Equal fractional scores leave no spread to resample: they get Wilson's, the widest case for their mean.

    >>> score_of([1.0, 0.0]).interval, score_of([0.5, 0.25]).interval
    ('wilson', 'bootstrap')
    """
    mean = math.fsum(scores) / len(scores)
    distinct = set(scores)
    if distinct <= {0.0, 1.0} or len(distinct) == 1:
        return MeanScore(mean, *wilson_interval(mean, len(scores)), len(scores), "wilson")
    return MeanScore(mean, *bootstrap_interval(scores), len(scores), "bootstrap")


def summarise(rows: Iterable[Row], *, baseline: str = "full") -> list[Cell]:
    """Aggregate per-sample rows into cells, with recovery measured against `baseline` of the same protocol.

    Args:
      rows: the lines of `results.jsonl`: id, method, budget, task, protocol, score in [0, 1], kept_bytes,
        full_bytes, read_bytes, span_kept (share or None), host_bytes where there are any, nll where right
        answers were fed. Other keys are not read.
      baseline: the method whose score counts as full recovery.

    Returns:
      Cells by protocol and method in order of appearance (the baseline first), larger caches first.

    >>> row = {"id": "0", "method": "full", "budget": None, "task": "get", "protocol": "aware", "score": 1.0,
    ...        "kept_bytes": 64, "full_bytes": 64, "read_bytes": 64, "span_kept": 1.0}
    >>> half = {**row, "method": "snapkv", "budget": 0.5, "score": 0.5, "kept_bytes": 32, "read_bytes": 32}
    >>> [(c.method, c.percent, c.recovery) for c in summarise([half, row])]
    [('full', 100.0, 1.0), ('snapkv', 50.0, 0.5)]
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    samples: set[tuple[str, str, str, str, str]] = set()
    for row in rows:
        # repr keeps one slot (1) and the whole cache (1.0) apart; as dictionary keys the two are equal.
        key = (row["protocol"], row["method"], repr(row["budget"]))
        sample = (*key, row["task"], str(row["id"]))
        _check(row, repeated=sample in samples)
        samples.add(sample)
        groups.setdefault(key, []).append(row)
    cells = [_cell(group) for group in groups.values()]
    references = _references(cells, baseline)
    protocols = list(dict.fromkeys(cell.protocol for cell in cells))
    methods = list(dict.fromkeys([baseline, *(cell.method for cell in cells)]))
    cells.sort(
        key=lambda c: (protocols.index(c.protocol), methods.index(c.method), -c.kept_bytes, -c.read_bytes)
    )
    scores = {key: scores_of(group) for key, group in groups.items()}
    return [_recovered(cell, references.get(cell.protocol), scores) for cell in cells]


def _name(cell: Cell) -> tuple[str, str, str]:
    return cell.protocol, cell.method, repr(cell.budget)


def _check(row: Row, *, repeated: bool) -> None:
    where = f"sample {row['id']!r} of {row['method']} at {row['budget']}, {row['task']}, {row['protocol']}"
    if repeated:
        raise ValueError(
            f"{where} appears twice: a repeated sample makes intervals too narrow, give each its own id"
        )
    if not 0.0 <= row["score"] <= 1.0:
        raise ValueError(f"{where}: score must be in [0, 1], got {row['score']}")
    if not row["full_bytes"] > 0:
        raise ValueError(f"{where}: full_bytes must be > 0, got {row['full_bytes']}")


def _cell(rows: list[Row]) -> Cell:
    scores: dict[str, list[float]] = {}
    for row in rows:
        scores.setdefault(row["task"], []).append(float(row["score"]))
    tasks = {task: replace(score_of(values), nll=_nll(rows, task)) for task, values in scores.items()}
    mean = math.fsum(score.mean for score in tasks.values()) / len(tasks)
    # Distances to the interval ends add like standard deviations (MOVER; Zou and Donner, 2008).
    below = math.hypot(*(score.mean - score.low for score in tasks.values())) / len(tasks)
    above = math.hypot(*(score.high - score.mean for score in tasks.values())) / len(tasks)
    spans = [float(row["span_kept"]) for row in rows if row["span_kept"] is not None]
    return Cell(
        method=rows[0]["method"],
        budget=rows[0]["budget"],
        protocol=rows[0]["protocol"],
        tasks=tasks,
        mean=mean,
        mean_low=max(0.0, mean - below),
        mean_high=min(1.0, mean + above),
        kept_bytes=_mean(rows, "kept_bytes"),
        full_bytes=_mean(rows, "full_bytes"),
        read_bytes=_mean(rows, "read_bytes"),
        span_kept=math.fsum(spans) / len(spans) if spans else None,
        host_bytes=math.fsum(row.get("host_bytes", 0) for row in rows) / len(rows),
        nll=_mean_or_none([score.nll for score in tasks.values()]),
    )


def _nll(rows: list[Row], task: str) -> float | None:
    return _mean_or_none([row.get("nll") for row in rows if row["task"] == task])


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    """Compute the mean of values that are all known: means over other samples would not compare."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if len(known) == len(values) else None


def _mean(rows: list[Row], key: str) -> float:
    return math.fsum(row[key] for row in rows) / len(rows)


def _references(cells: list[Cell], baseline: str) -> dict[str, Cell]:
    references: dict[str, Cell] = {}
    for cell in cells:
        if cell.method != baseline:
            continue
        if cell.protocol in references:
            budgets = f"{references[cell.protocol].budget} and {cell.budget}"
            raise ValueError(f"the baseline {baseline} must have one budget per protocol, got {budgets}")
        references[cell.protocol] = cell
    return references


def _recovered(cell: Cell, reference: Cell | None, scores: Mapping[tuple[str, str, str], Scores]) -> Cell:
    if reference is None:
        return cell
    own = cell is reference
    versus = None if own else difference(scores[_name(cell)], scores[_name(reference)])
    cell = replace(cell, reference=own, versus=versus)
    pairs = {
        task: (score.mean, reference.tasks[task].mean)
        for task, score in cell.tasks.items()
        if task in reference.tasks
    }
    ratios = {task: mean / full for task, (mean, full) in pairs.items() if full > 0.0}
    if not ratios:
        return cell
    worst = min(ratios, key=lambda task: ratios[task])
    recovery = math.fsum(mean for mean, _ in pairs.values()) / math.fsum(full for _, full in pairs.values())
    return replace(cell, recovery=recovery, worst_task=worst, worst_recovery=ratios[worst])
