"""Every method against every other on the same samples, at each budget: the page's matrix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvjax.eval.report.cells import NominalBudget, Row, budget_label
from kvjax.eval.report.paired import Difference, Scores, difference, scores_of


@dataclass(frozen=True)
class Duels:
    """Every method against every other at one budget: `found[i, j]`, i < j, is names[i] minus names[j]."""

    title: str
    names: tuple[str, ...]
    found: Mapping[tuple[int, int], Difference]


def duels(title: str, scores: Mapping[str, Scores], *, shares: bool = True) -> Duels:
    """Compute the differences between all methods of `scores`; shares as in `difference`.

    >>> found = duels("get", {"a": {("get", "0"): 1.0}, "b": {("get", "0"): 0.5}})
    >>> found.found[0, 1].mean, found.found[0, 1].p  # one sample: no test
    (0.5, None)
    """
    names, values = tuple(scores), list(scores.values())
    both = ((i, j) for j in range(len(names)) for i in range(j))
    found = {(i, j): d for i, j in both if (d := difference(values[i], values[j], shares=shares)) is not None}
    return Duels(title, names, found)


def duels_of(rows: Iterable[Row], *, shares: bool = True) -> list[Duels]:
    """One matrix per protocol and budget; methods without a budget are in all of a protocol's.

    >>> one = {"id": "0", "task": "get", "protocol": "aware", "score": 1.0}
    >>> rows = [one | {"method": m, "budget": b} for m, b in (("full", None), ("h2o", 0.5), ("h2o", 0.25))]
    >>> [(d.title, d.names) for d in duels_of(rows)]
    [('aware · budget 0.5', ('full', 'h2o')), ('aware · budget 0.25', ('full', 'h2o'))]
    """
    groups: dict[str, dict[tuple[str, str], list[Row]]] = {}
    budgets: dict[str, NominalBudget] = {}
    for row in rows:
        # repr keeps one slot (1) and the whole cache (1.0) apart.
        budgets[repr(row["budget"])] = row["budget"]
        cells = groups.setdefault(row["protocol"], {})
        cells.setdefault((row["method"], repr(row["budget"])), []).append(row)
    out = []
    for protocol, cells in groups.items():
        scores = {key: scores_of(found) for key, found in cells.items()}
        there = [b for b in budgets if b != "None" and any(of == b for _, of in cells)]
        for budget in there or ["None"]:
            title = f"{protocol} · budget {budget_label(budgets[budget])}" if there else protocol
            chosen = {name: found for (name, of), found in scores.items() if of in (budget, "None")}
            out.append(duels(title, chosen, shares=shares))
    return out
