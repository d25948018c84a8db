"""Cells: the methods that a comparison runs, each at its budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvjax.api.fit_arrays import check_fits
from kvjax.api.prepare import made
from kvjax.base.errors import InputError
from kvjax.compat.model_fit import check_fit
from kvjax.compat.shipped_fits import ready
from kvjax.grammar import Budget, Method
from kvjax.grammar.fitted import is_fitted
from kvjax.hosts.arrays import is_shared
from kvjax.hosts.messages import count, number_of
from kvjax.io.gin_bindings import load_preset
from kvjax.methods import METHODS
from kvjax.methods.parse import parse_method
from kvjax.models.model import Model
from kvjax.pure import bind

# These always run, because a method that is no better than they are at equal bytes has shown nothing.
ALWAYS = ("full", "random", "sink-recent")
# The default methods, which take a minute or two: eviction in steps, after a prompt, and without knowledge of
# the question; codes; and retrieval of a few pages.
FIRST = ("h2o", "snapkv", "kvzip", "kivi", "quest")
# The default on a model that reads English, where methods take a small share of the time.
FIRST_IN_ENGLISH = (
    *("streamingllm", "h2o", "tova", "snapkv", "adakv", "expected-attention", "keydiff", "kvzip"),
    *("int4", "kivi", "snapkv + kivi", "quest"),
)
# "well-known": a few of every family, the most popular ones.
WELL_KNOWN = (
    *("streamingllm", "h2o", "tova"),
    *("keydiff", "expected-attention", "snapkv", "kvzip", "pyramidkv", "adakv", "d2o"),
    *("int8", "int4", "kivi", "turboquant", "quest"),
)
BUDGETS = (0.5, 0.25)


class PlannedCell(NamedTuple):
    """One cell of a comparison: a label, its nominal budget (None if it has none), and the method."""

    label: str
    budget: float | int | None
    method: Method


# A method that is not given as text: its label, whether it takes a budget, and how to build it.
Custom = tuple[str, bool, Callable[[float | int | None], Method]]


def _bound(method: Method, model: Model) -> Method:
    """Bind the method as it runs on the model, or on its rewrite; InputError if it does not fit."""
    method = ready(model, method)
    check_fits(model, method)
    return bind(method, made(model, method))


def _runs(method: Method, model: Model) -> bool:
    """Whether a method has all fitted arrays it needs, and, if it rewrites models, can rewrite this one."""
    method = ready(model, method)
    if method.make is None:
        return is_fitted(method)
    try:
        check_fit(method, model.config)
    except InputError:
        return False
    return is_fitted(method)


def share_of(entries: Sequence[PlannedCell], number: int, of: int) -> list[PlannedCell]:
    """Return the cells that host `number` of `of` runs: all budgets of a method, which share programs.

    >>> [e.label for e in share_of([PlannedCell("a", 1, Method()), PlannedCell("b", 1, Method())], 1, 2)]
    ['b']
    """
    labels = list(dict.fromkeys(entry.label for entry in entries))
    return [entry for entry in entries if labels.index(entry.label) % of == number]


def my_cells(model: Model, entries: Sequence[PlannedCell]) -> list[PlannedCell]:
    """Return the cells that this host runs: its share, or all if several hosts hold the model together."""
    return [*entries] if is_shared(model.params) else share_of(entries, number_of(), count())


def plan_cells(
    model: Model,
    methods: Sequence[str | Method | Custom] | None,
    budgets: Sequence[float | int] | None,
    preset: str,
    baselines: bool = True,
    first: Sequence[str] = FIRST,
) -> list[PlannedCell]:
    """Return every (method, budget) of a comparison, the anchors first, unless `baselines` is False.

    Methods are texts as `parse_method` reads them, Methods, which run as they are, or Custom. None takes
    `first`, "well-known" for WELL_KNOWN, and "all" for every method that need not be fitted first or comes
    with its fit for this model; all three skip methods that rewrite weights which the model does not have.
    `budgets` apply to every text without a budget of its own; without them, a preset's budget of a method
    holds before the default ones. ValueError for unknown names, hyper-parameters or budgets.
    """
    hyper = load_preset(preset)
    if budgets is not None:
        hyper = {id: {k: v for k, v in given.items() if k != "budget"} for id, given in hyper.items()}
    budgets = tuple(Budget(b).amount for b in (BUDGETS if budgets is None else budgets))
    if len({*budgets}) < len(budgets):
        raise InputError(
            f"--budgets {' '.join(map(str, budgets))} has equal numbers, expected every one once: remove one"
        )
    found: dict[str, Custom] = {}
    groups = {"all": tuple(METHODS), "well-known": WELL_KNOWN}
    chosen = (
        first if methods is None else [id for m in methods if isinstance(m, str) for id in groups.get(m, ())]
    )
    named = [m for m in methods or () if not (isinstance(m, str) and m in groups)]
    for item in (*(ALWAYS if baselines else ()), *chosen, *named):
        if isinstance(item, str):
            label, build = parse_method(item, hyper)
            found.setdefault(label, (label, build.takes_budget, build))
        elif isinstance(item, Method):
            found.setdefault(repr(item), (repr(item), False, lambda _, item=item: item))
        elif isinstance(item, tuple) and len(item) == 3 and callable(item[2]):
            found.setdefault(item[0], item)
        else:
            raise InputError(
                f"a method is {item!r:.60}, expected text such as 'snapkv', a Method, or (label, whether it "
                "takes a budget, function)"
            )
    entries = [
        PlannedCell(label, b, _bound(build(b), model))
        for label, budgeted, build in found.values()
        for b in (budgets if budgeted else (None,))
        if label not in chosen or label in named or _runs(build(b), model)
    ]
    if not entries:
        raise InputError("nothing is left to compare without the baselines: give --methods")
    return entries
