"""Cells: which sentences a comparison runs, each at which budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvjax.gin_bindings import load_preset
from kvjax.grammar import Budget, Method
from kvjax.methods import TABLE, method, resolve, takes_budget

# Always there: a method that does not beat these at equal bytes has not shown anything.
ALWAYS = ("full", "random", "sink-recent")
BUDGETS = (0.5, 0.25, 0.125)


class Entry(NamedTuple):
    """One cell: a label, its nominal budget (None where it has none), and the sentence."""

    label: str
    budget: float | int | None
    method: Method


# A user's method: its label, whether it takes a budget, and how to build it.
Custom = tuple[str, bool, Callable[[float | int | None], Method]]


def plan_cells(
    methods: Sequence[str | Custom] | None, budgets: Sequence[float | int] | None, preset: str
) -> list[Entry]:
    """Every (method, budget) of a comparison, the anchors first; ValueError for unknown names or budgets.

    >>> [e.label for e in plan_cells(["kivi"], None, "short")][:2]
    ['full', 'random']
    """
    budgets = tuple(BUDGETS if budgets is None else budgets)
    for b in budgets:
        Budget(b)
    hyper = load_preset(preset)
    wanted: list[str | Custom] = list(ALWAYS)
    for m in methods if methods is not None else TABLE:
        name = resolve(m) if isinstance(m, str) else m
        if name not in wanted:
            wanted.append(name)
    entries = []
    for item in wanted:
        if isinstance(item, str):
            label, budgeted = item, takes_budget(item)
            values = hyper.get(item, {})

            def build(b: float | int | None, item: str = item, values: dict = values) -> Method:
                return method(item, **values, **({} if b is None else {"budget": b}))
        else:
            label, budgeted, build = item
        for b in budgets if budgeted else (None,):
            entries.append(Entry(label, b, build(b)))
    return entries
