"""Methods: every published method is one short function, with what is known of its paper beside it.

A method lives in the file of its family; a family that outgrows a file (400 lines) is split, for example by
what its scores look at. This module collects the functions of those files by id. What methods are made of
lies in `kvjax.keep`, `kvjax.store` and `kvjax.read`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.errors import InputError
from kvjax.fitted import is_fitted
from kvjax.grammar import Method, chain, check
from kvjax.methods import (
    baseline,
    budget_head,
    budget_layer,
    low_rank,
    merge_head,
    merge_layer,
    merge_token,
    merge_token_learned,
    prefix_reuse,
    pruning,
    quant,
    quant_mixed,
    retrieval_sparse_pages,
    retrieval_sparse_slots,
    selection_dynamic_attention,
    selection_dynamic_learned,
    selection_dynamic_position,
    selection_static_attention,
    selection_static_keys,
    selection_static_learned,
    selection_static_passages,
)
from kvjax.methods.papers import MethodFunction, Press, collect, paper
from kvjax.methods.parameters import checked
from kvjax.methods.user import from_file

# The order of every list of methods; within a file, the order of its functions.
_FAMILIES = (
    baseline,
    selection_dynamic_position,
    selection_dynamic_attention,
    selection_dynamic_learned,
    selection_static_keys,
    selection_static_learned,
    selection_static_attention,
    selection_static_passages,
    budget_layer,
    budget_head,
    merge_token,
    merge_token_learned,
    merge_head,
    merge_layer,
    low_rank,
    pruning,
    quant,
    quant_mixed,
    retrieval_sparse_pages,
    retrieval_sparse_slots,
    prefix_reuse,
)

METHODS = collect(*_FAMILIES)
ALIASES = {alias: id for id, function in METHODS.items() for alias in function.paper.aliases}


class MethodInfo(NamedTuple):
    """What is known of a method.

    phase says when it acts; training whether it needs fitted weights; exact how it compares with its paper
    (see `Paper`); kvpress is the name of its class in kvpress, "" without one.
    """

    id: str
    title: str
    arxiv: str
    year: int | None
    family: str
    verbs: tuple[str, ...]
    phase: str
    training: bool
    exact: str
    kvpress: str


def resolve(id: str) -> str:
    """The id that an id or alias stands for; ValueError naming the nearest one where there is none.

    >>> resolve("Ada_KV")
    'adakv'
    """
    name = ALIASES.get(id.lower().replace("_", "-"), id.lower().replace("_", "-"))
    if name not in METHODS:
        near = difflib.get_close_matches(name, [*METHODS, *ALIASES], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known methods: {', '.join(METHODS)}"
        if ":" in id:
            # As the command line writes it.
            hint = "hyper-parameters are arguments here, as in kvjax.method('snapkv', budget=0.25, window=16)"
        raise ValueError(f"unknown method {id!r}: {hint}")
    return name


@cache
def _build(id: str, hyper: tuple[tuple[str, Any], ...], kinds: tuple[Any, ...]) -> Method:
    built = dataclasses.replace(METHODS[id](**dict(hyper)), spec=(id, hyper))
    check(built)
    return built


def _kind(key: str, value: Any) -> Any:
    """What tells equal values apart: a budget of 1 slot from one of 1.0, a file from what it was before."""
    if key == "fitted" and isinstance(value, str) and Path(value).is_file():
        stat = Path(value).stat()
        return stat.st_mtime_ns, stat.st_size
    return type(value)


def method(id: str, **hyper: Any) -> Method:
    """The method `id` with its hyper-parameters; equal arguments give the same object.

    id: of the library, or path/to/file.py:function for one of your own.

    budget is a fraction of the tokens kept (float in (0, 1]) or slots per head (int >= 1; the mean where
    heads or layers differ).

    >>> method("snapkv", budget=0.25, window=16).id
    'snapkv'
    """
    if ".py:" in id or id.endswith(".py"):
        return from_file(id, **hyper)
    name = resolve(id)
    values = check_hyper(name, hyper)
    if takes_budget(name) and "budget" not in hyper:
        raise ValueError(f"method {name!r} needs budget=: a fraction such as 0.25, or a number of slots")
    ordered = tuple(sorted(values.items()))
    return _build(name, ordered, tuple(_kind(key, value) for key, value in ordered))


def as_method(given: object) -> Method:
    """What a call was given as its method: one by its id, as it is, or None, which keeps everything.

    Raises InputError for anything else, ValueError for an id that is unknown or needs a budget.

    >>> as_method("int8").id, as_method(None).id
    ('int8', 'full')
    """
    if isinstance(given, str):
        return method(given)
    if given is None:
        return Method()
    if isinstance(given, Method):
        return given
    raise InputError(
        f"method is {given!r:.80}, expected a Method or an id such as 'int8': give kvjax.method('snapkv', "
        "budget=0.25), or kvjax.chain(...) of words"
    )


def check_hyper(id: str, hyper: Mapping[Any, Any]) -> dict[str, Any]:
    """The hyper-parameters of a method of the library as its function takes them.

    Raises ValueError for one that the method does not have, with the nearest name, and for a value outside
    its range.

    >>> check_hyper("kivi", {"bits": 4})
    {'bits': 4}
    """
    known = inspect.signature(METHODS[id]).parameters
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
    return name in inspect.signature(METHODS[resolve(id)]).parameters


def methods() -> list[MethodInfo]:
    """What is known of every method, in the order of the families' files.

    >>> methods()[0].id
    'full'
    """
    return [_info(id) for id in METHODS]


def _info(id: str) -> MethodInfo:
    known = METHODS[id].paper
    built = method(id, **({"budget": 0.5} if takes_budget(id) else {}))
    keep = built.keep
    parts = ("make", "keep", "store", "read", "reread", "stack")
    verbs = [n for n in parts if getattr(built, n) is not None]
    if built.host is not None or (keep is not None and not keep.allocate.uniform):
        verbs.append("place")
    return MethodInfo(
        id,
        known.title,
        known.arxiv,
        known.year,
        known.family,
        tuple(verbs),
        _phase(built),
        training=not is_fitted(built),
        exact=known.exact,
        kvpress=known.kvpress.name if known.kvpress else "",
    )


def _phase(built: Method) -> str:
    if built.read is not None:
        return "decode"
    if (
        built.store is not None
        or built.make is not None
        or (built.keep is not None and built.keep.when.in_steps)
    ):
        return "both"
    return "none" if (built.keep, built.reread, built.stack) == (None,) * 3 else "prefill"


_BY_NAME = {function.__name__: function for function in METHODS.values()}


def __getattr__(name: str) -> MethodFunction:
    # `from kvjax.methods import snapkv` finds the functions of all families without a list of their names.
    if name not in _BY_NAME:
        raise AttributeError(f"module 'kvjax.methods' has no attribute {name!r}")
    return _BY_NAME[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *_BY_NAME])


class _CallableModule(types.ModuleType):
    # `kvjax.methods` is both this folder and the public call that lists it.
    def __call__(self) -> list[MethodInfo]:
        return methods()


sys.modules[__name__].__class__ = _CallableModule

__all__ = [
    "ALIASES",
    "METHODS",
    "MethodInfo",
    "Press",
    "chain",
    "method",
    "methods",
    "paper",
    "resolve",
    "takes",
    "takes_budget",
]
