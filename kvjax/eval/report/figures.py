"""Figures as people read them, in the printed table and on the page: no more digits than were measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvjax.eval.report.cells import Cell, NominalBudget, budget_label
from kvjax.state.shardings import heavier

# Per (method, budget): the median of some timings under their name; where several were taken, their number
# under the name with `_timings`, the smallest and the largest under the name with `_low` and `_high`.
Timings = Mapping[tuple[str, NominalBudget], Mapping[str, float]]

# Below this many, the spread of timings is not known.
SEVERAL = 3
_INTERVALS = {"wilson": "Wilson for 0/1 scores", "bootstrap": "bootstrap for fractional scores"}
# The legend of the column "−log p".
NLL_WORDS = "−log p: of the right answer's tokens, in nats per token, mean over tasks; less is better."
_TESTS = {
    "mcnemar": "McNemar's exact test of 0/1 scores",
    "bootstrap": "paired bootstrap where scores are fractional",
}


def rounded(value: float, digits: int) -> str:
    """Round a number to so many significant digits, padded with zeros.

    >>> rounded(10296.0, 2), rounded(13985.0, 3), rounded(0.0432, 2), rounded(7.0, 2)
    ('10000', '14000', '0.043', '7.0')
    """
    exponent = 0 if value == 0 else int(f"{value:e}".partition("e")[2])
    places = digits - 1 - exponent
    shown = round(value, places)
    return f"{shown:.{max(0, places)}f}"


def signed(value: float, digits: int = 0) -> str:
    """Write a difference with its sign; what rounds to zero has none.

    >>> signed(3.4), signed(-0.2), signed(0.0), signed(-0.00004, 4), signed(-0.02, 4)
    ('+3', '0', '0', '0.0000', '-0.0200')
    """
    zero = f"{0:.{digits}f}"
    shown = f"{value:z.{digits}f}"
    return zero if shown == zero else f"{value:+.{digits}f}"


def larger_than_full(measured: Iterable[tuple[str, NominalBudget, float, float]]) -> str:
    """Names the methods that keep more bytes than the full cache; "" if there are none.

    measured: method, budget, kept bytes and bytes of the full cache.

    >>> larger_than_full([("quest", 0.5, 120.0, 100.0), ("kivi", None, 30.0, 100.0)])
    'Larger than the full cache: quest at 0.5.'
    """
    heavy = [(method, budget) for method, budget, kept, full in measured if heavier(kept, full)]
    names = dict.fromkeys(m if b is None else f"{m} at {budget_label(b)}" for m, b in heavy)
    return f"Larger than the full cache: {', '.join(names)}." if names else ""


def larger_cells(cells: Iterable[Cell]) -> str:
    """`larger_than_full` of a comparison's cells."""
    return larger_than_full((c.method, c.budget, c.kept_bytes, c.full_bytes) for c in cells)


def larger_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    """`larger_than_full` of a text's rows."""
    names = ("method", "budget", "kept_bytes", "full_bytes")
    return larger_than_full(tuple(row[name] for name in names) for row in rows)


def speed(timing: Mapping[str, float], name: str) -> tuple[str, str]:
    """Write a median and the spread of its timings; one or two give two digits and no spread; "" if none.

    >>> speed({"prefill_ms": 41.37}, "prefill_ms")
    ('41', '')
    >>> three = {"prefill_ms_timings": 3, "prefill_ms_low": 38.2, "prefill_ms_high": 51.0}
    >>> speed({"prefill_ms": 41.37, **three}, "prefill_ms")
    ('41.4', '38.2–51.0')
    """
    if name not in timing:
        return "", ""
    if timing.get(f"{name}_timings", 1) < SEVERAL:
        return rounded(timing[name], 2), ""
    low, high = (rounded(timing[f"{name}_{end}"], 3) for end in ("low", "high"))
    return rounded(timing[name], 3), f"{low}–{high}"


def nats(value: float | None) -> str:
    """Write a -log p in nats; a dash where it was not measured.

    >>> nats(0.01234), nats(2.0), nats(12.345), nats(None)
    ('0.012', '2.00', '12.3', '–')
    """
    if value is None:
        return "–"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def chance(p: float | None) -> str:
    """Write a p-value; a dash where there was no test.

    >>> chance(0.0312), chance(0.0004), chance(0.42), chance(None)
    ('0.03', '<0.001', '0.4', '–')
    """
    if p is None:
        return "–"
    return "<0.001" if p < 0.001 else f"{p:.1g}"


def interval_names(cells: Sequence[Cell]) -> str:
    """How the intervals of these cells were made, in words.

    >>> from kvjax.eval.report.cells import score_of
    >>> get = {"get": score_of([1.0])}
    >>> interval_names([Cell("full", None, "aware", get, 1.0, 0.2, 1.0, 8.0, 8.0, 8.0, None)])
    'Wilson for 0/1 scores'
    """
    present = {score.interval for cell in cells for score in cell.tasks.values()}
    return ", ".join(words for kind, words in _INTERVALS.items() if kind in present)


def tests_in_words(cells: Sequence[Cell]) -> str:
    """How the differences of these cells to the full cache were tested, in words; "" where none were."""
    present = {cell.versus.test for cell in cells if cell.versus is not None}
    return ", ".join(words for kind, words in _TESTS.items() if kind in present)


def sample_count(cells: Sequence[Cell]) -> str:
    """How many samples a task has, as a range where they differ.

    >>> from kvjax.eval.report.cells import score_of
    >>> tasks = {"get": score_of([1.0] * 8), "all": score_of([1.0] * 6)}
    >>> sample_count([Cell("full", None, "aware", tasks, 1.0, 0.2, 1.0, 8.0, 8.0, 8.0, None)])
    '6–8'
    """
    counts = sorted({score.samples for cell in cells for score in cell.tasks.values()})
    return "–".join(str(count) for count in dict.fromkeys([*counts[:1], *counts[-1:]]))
