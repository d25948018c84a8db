"""Methods: every published method as one short function, and the one table that names them all."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
import types
from functools import cache
from typing import Any, NamedTuple

from kvjax.grammar import STEP, Method, chain, check
from kvjax.methods.eviction import (
    adakv,
    expected_attention,
    h2o,
    keepkv,
    kvzip,
    l2compress,
    pyramidkv,
    random,
    sink_recent,
    snapkv,
    streamingllm,
    tova,
)
from kvjax.methods.quantisation import fp8, full, int4, int8, kivi
from kvjax.methods.reading import quest
from kvjax.methods.table import ALIASES, TABLE


class MethodInfo(NamedTuple):
    """One row of the table of methods. phase says when it acts; training whether it needs fitted weights."""

    id: str
    title: str
    arxiv: str
    year: int | None
    family: str
    verbs: tuple[str, ...]
    phase: str
    training: bool


def resolve(id: str) -> str:
    """The table's id for an id or alias; ValueError naming the nearest one otherwise."""
    name = ALIASES.get(id.lower().replace("_", "-"), id.lower().replace("_", "-"))
    if name not in TABLE:
        near = difflib.get_close_matches(name, [*TABLE, *ALIASES], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known methods: {', '.join(TABLE)}"
        if ":" in id:
            # As the command line writes it.
            hint = "hyper-parameters are arguments here, as in kvjax.method('snapkv', budget=0.25, window=16)"
        raise ValueError(f"unknown method {id!r}: {hint}")
    return name


@cache
def _build(id: str, hyper: tuple[tuple[str, Any], ...]) -> Method:
    built = dataclasses.replace(TABLE[id].build(**dict(hyper)), spec=(id, hyper))
    check(built)
    return built


def method(id: str, **hyper: Any) -> Method:
    """The method `id` with its hyper-parameters; equal arguments give the same object.

    budget is a fraction of the tokens kept (float in (0, 1]) or slots per head (int >= 1; the mean where
    heads or layers differ).

    >>> method("snapkv", budget=0.25, window=16).id
    'snapkv'
    """
    name = resolve(id)
    known = inspect.signature(TABLE[name].build).parameters
    for key in hyper:
        if key not in known:
            near = difflib.get_close_matches(key, list(known), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known) or 'none'}"
            raise ValueError(f"method {name!r} has no hyper-parameter {key!r}: {hint}")
    if "budget" in known and "budget" not in hyper:
        raise ValueError(f"method {name!r} needs budget=: a fraction such as 0.25, or a number of slots")
    return _build(name, tuple(sorted(hyper.items())))


def takes_budget(id: str) -> bool:
    """Whether a method has a budget to choose."""
    return "budget" in inspect.signature(TABLE[resolve(id)].build).parameters


def methods() -> list[MethodInfo]:
    """Every method in the table, in its order."""
    out = []
    for id, row in TABLE.items():
        m = row.build(**({"budget": 0.5} if takes_budget(id) else {}))
        verbs = tuple(n for n in ("keep", "store", "read") if getattr(m, n) is not None)
        if m.keep is not None and not m.keep.allocate.uniform:
            verbs = (*verbs, "place")
        both = m.store is not None or (m.keep is not None and m.keep.when == STEP)
        phase = "decode" if m.read is not None else "both" if both else "prefill" if m.keep else "none"
        out.append(MethodInfo(id, row.title, row.arxiv, row.year, row.family, verbs, phase, False))
    return out


class _CallableModule(types.ModuleType):
    # `kvjax.methods` is both this folder and the public call that lists it.
    def __call__(self) -> list[MethodInfo]:
        return methods()


sys.modules[__name__].__class__ = _CallableModule

__all__ = [
    "ALIASES",
    "TABLE",
    "MethodInfo",
    "adakv",
    "chain",
    "expected_attention",
    "fp8",
    "full",
    "h2o",
    "int4",
    "int8",
    "keepkv",
    "kivi",
    "kvzip",
    "l2compress",
    "method",
    "methods",
    "pyramidkv",
    "quest",
    "random",
    "resolve",
    "sink_recent",
    "snapkv",
    "streamingllm",
    "takes_budget",
    "tova",
]
