"""The table of methods: the functions of all families by their ids, and how methods are built from them."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kvjax.grammar import Method, check
from kvjax.methods.elsewhere import elsewhere
from kvjax.methods.papers import collect
from kvjax.methods.parameters import checked, signature_of

# The order of every list of methods; within a family, that of its files' names and of their functions.
_FAMILIES = (
    "baseline",
    "selection_dynamic",
    "selection_static",
    "budget_layer",
    "budget_head",
    "merge_token",
    "merge_head",
    "merge_layer",
    "low_rank",
    "pruning",
    "quant",
    "quant_mixed",
    "outlier_transform",
    "retrieval_sparse",
    "prefill_sparse",
    "prefix_reuse",
)


def _family(module: str) -> str:
    """Return the family that a module's name begins with; "" if it holds no methods."""
    return max((family for family in _FAMILIES if module.startswith(family)), key=len, default="")


def _files() -> list[str]:
    """List the modules of this folder that hold methods."""
    found = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return sorted(filter(_family, found), key=lambda name: (_FAMILIES.index(_family(name)), name))


# Modules with methods, and perhaps with words that one method needs.
FILES = tuple(importlib.import_module(f"kvjax.methods.{name}") for name in _files())
METHODS = collect(*FILES)
ALIASES = {alias: id for id, function in METHODS.items() for alias in function.paper.aliases}


def resolve(id: str) -> str:
    """Resolve an id or alias to the id it stands for; ValueError, with the nearest one, if it is unknown.

    >>> resolve("Ada_KV")
    'adakv'
    """
    name = ALIASES.get(id.lower().replace("_", "-"), id.lower().replace("_", "-"))
    if name not in METHODS:
        if where := elsewhere(name):
            raise ValueError(f"{id!r} is no method of a cache; it {where}")
        near = difflib.get_close_matches(name, [*METHODS, *ALIASES], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known methods: {', '.join(METHODS)}"
        raise ValueError(f"unknown method {id!r}: {hint}")
    return name


@cache
def _build(id: str, hyper: tuple[tuple[str, Any], ...], kinds: tuple[Any, ...]) -> Method:
    built = METHODS[id](**dict(hyper)).called((id, hyper))
    check(built)
    return built


def _kind(key: str, value: Any) -> Any:
    """Distinguish values that compare equal: 1 slot and a share of 1.0, two states of a file."""
    if key == "fitted" and isinstance(value, str) and Path(value).is_file():
        stat = Path(value).stat()
        return stat.st_mtime_ns, stat.st_size
    return type(value)


def build(id: str, hyper: Mapping[str, Any]) -> Method:
    """Build the method of an id with its hyper-parameters; equal ones give the same object.

    Raises ValueError for unknown ids and hyper-parameters, wrong values, and a budget that is missing.
    """
    name = resolve(id)
    values = check_hyper(name, hyper)
    if takes_budget(name) and "budget" not in hyper:
        raise ValueError(f"method {name!r} needs budget=: a fraction such as 0.25, or a number of slots")
    ordered = tuple(sorted(values.items()))
    return _build(name, ordered, tuple(_kind(key, value) for key, value in ordered))


def check_hyper(id: str, hyper: Mapping[Any, Any]) -> dict[str, Any]:
    """Convert the hyper-parameters of a method of the library to the types of its function.

    Raises ValueError for one that the method does not have, with the nearest name, and for a value outside
    its range.

    >>> check_hyper("kivi", {"bits": 4})
    {'bits': 4}
    """
    known = signature_of(METHODS[id]).parameters
    for key in hyper:
        if key not in known:
            near = difflib.get_close_matches(str(key), list(known), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known) or 'none'}"
            raise ValueError(f"method {id!r} has no hyper-parameter {key!r}: {hint}")
    return checked(id, METHODS[id], hyper)


def takes_budget(id: str) -> bool:
    """Whether a method has a budget to choose."""
    return takes(id, "budget")


def takes(id: str, name: str) -> bool:
    """Whether a method has a hyper-parameter of that name."""
    return name in signature_of(METHODS[resolve(id)]).parameters
