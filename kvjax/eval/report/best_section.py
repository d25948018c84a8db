"""The best methods of every budget: those not significantly worse than the one with the highest score."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from kvjax.eval.report.cells import Cell, NominalBudget, Row, budget_label
from kvjax.eval.report.comparison_table import byte_unit
from kvjax.eval.report.method_cards import families_of, linked
from kvjax.eval.report.paired import difference, scores_of

# So many are named, in order of their scores.
_NAMED = 8


class Best(NamedTuple):
    """The cells of a protocol and budget that do not differ significantly from the first, the best.

    few: whether there are too few samples to distinguish any. of: the number of methods.
    """

    protocol: str
    budget: NominalBudget
    cells: tuple[Cell, ...]
    few: bool
    of: int


def best_of(cells: Sequence[Cell], rows: Iterable[Row]) -> list[Best]:
    """Find the best cells per protocol and budget, without the full cache; None is a budget of its own.

    A cell is included if p >= 0.05 for the paired difference of the scores (`difference`).
    """
    scored: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        scored.setdefault((row["protocol"], row["method"], repr(row["budget"])), []).append(row)
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if not cell.reference:
            groups.setdefault((cell.protocol, repr(cell.budget)), []).append(cell)
    found = []
    for group in groups.values():
        group = sorted(group, key=lambda cell: (-cell.mean, cell.kept_bytes))
        scores = [scores_of(scored[cell.protocol, cell.method, repr(cell.budget)]) for cell in group]
        versus = [difference(other, scores[0]) for other in scores[1:]]
        alike = [c for c, d in zip(group[1:], versus, strict=True) if d and (d.p is None or d.p >= 0.05)]
        few = any(d is not None and d.p is None for d in versus)
        found.append(Best(group[0].protocol, group[0].budget, (group[0], *alike), few, len(group)))
    order = list(dict.fromkeys(cell.protocol for cell in cells))
    return sorted(found, key=lambda one: (order.index(one.protocol), *_size(one.budget)))


def _size(budget: NominalBudget) -> tuple[int, float]:
    """Sort shares from large to small, then numbers of slots, then methods without a budget."""
    return (2, 0.0) if budget is None else (int(isinstance(budget, int)), -float(budget))


def best_section(cells: Sequence[Cell], rows: Sequence[Row]) -> str:
    """Write the section as HTML; "" without rows."""
    found = best_of(cells, rows) if rows else []
    if not found:
        return ""
    unit, known = byte_unit(cells), {cell.method for cell in cells}
    lines = "".join(_line(one, unit, known) for one in found)
    note = " Too few samples to tell methods apart: more are needed." if any(b.few for b in found) else ""
    return f"""<section id="best"><h2>Best at each budget</h2>
<p class="muted">The method that scores most, and those that the same samples do not tell apart from it
(p ≥ 0.05, paired). In brackets: what it keeps.{note}</p>
<div class="scroll"><table class="best"><thead><tr><th class="text">protocol</th><th class="text">budget</th>
<th class="text">best</th><th class="text">not told apart from it</th></tr></thead>
<tbody>{lines}</tbody></table></div></section>"""


def _line(best: Best, unit: tuple[str, float], known: set[str]) -> str:
    first, *others = (_named(cell, unit, known) for cell in best.cells)
    more = f"<span>and {len(others) - _NAMED} more</span>" if len(others) > _NAMED else ""
    alike = " ".join(others[:_NAMED]) + more or ("–" if best.of > 1 else "no other method has this budget")
    budget = "none" if best.budget is None else budget_label(best.budget)
    return (
        f'<tr data-protocol="{escape(best.protocol)}"><td class="text">{escape(best.protocol)}</td>'
        f'<td class="text">{budget}</td><td class="text">{first}</td><td class="text wrap">{alike}</td></tr>'
    )


def _named(cell: Cell, unit: tuple[str, float], known: set[str]) -> str:
    kept = f"{cell.percent:.1f}%, {cell.kept_bytes / unit[1]:,.0f} {unit[0]}"
    families = escape(" ".join(families_of(cell.method)))
    return (
        f'<span data-families="{families}"><b>{linked(cell.method, known)}</b> {100 * cell.mean:.0f}% '
        f"<small>({kept})</small></span>"
    )
