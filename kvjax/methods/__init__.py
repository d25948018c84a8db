"""Methods: every published method is one short function, with the facts about its paper beside it.

A method is in a file whose name begins with its family, such as `quant_formats.py`; `registry.py` finds these
files and collects their functions by id. The parts that methods are built from are in `kvjax.keep`,
`kvjax.store` and `kvjax.read`; a codec that one method needs may stand beside it.
"""

from __future__ import annotations

import sys
import types
from typing import Any, NamedTuple

from kvjax.grammar import Method
from kvjax.grammar.fitted import is_fitted
from kvjax.methods import per_layer, tiers, wrappers  # noqa: F401 (the functions that texts name)
from kvjax.methods.papers import MethodFunction, Press, paper
from kvjax.methods.parse import as_method, chain, method
from kvjax.methods.registry import ALIASES, METHODS, check_hyper, resolve, takes, takes_budget


class MethodInfo(NamedTuple):
    """The facts about a method.

    phase: when it acts; training: whether it needs fitted weights; exact: how it compares with its paper
    (see `Paper`); kvpress: the name of its class in kvpress, "" without one.
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


def methods() -> list[MethodInfo]:
    """List every method of the library, in the order of the families' files.

    Returns:
        A `MethodInfo` for each: id, title, paper, family, and how it compares with its paper.

    >>> methods()[0].id
    'full'
    """
    return [_info(id) for id in METHODS]


def _info(id: str) -> MethodInfo:
    known = METHODS[id].paper
    return info_of(
        id,
        method(id, **({"budget": 0.5} if takes_budget(id) else {})),
        title=known.title,
        arxiv=known.arxiv,
        year=known.year,
        family=known.family,
        exact=known.exact,
        kvpress=known.kvpress.name if known.kvpress else "",
    )


def info_of(id: str, built: Method, **known: Any) -> MethodInfo:
    """Build a `MethodInfo` from `@paper`'s facts and a description of the method's grammar."""
    keep = built.keep
    parts = ("make", "keep", "store", "read", "read_prompt", "reread", "stack")
    verbs = [n for n in parts if getattr(built, n) is not None]
    if built.host is not None or (keep is not None and not keep.allocate.uniform):
        verbs.append("place")
    return MethodInfo(id=id, verbs=tuple(verbs), phase=_phase(built), training=not is_fitted(built), **known)


def _phase(built: Method) -> str:
    if built.read is not None:
        return "decode"
    if (
        built.store is not None
        or built.make is not None
        or (built.keep is not None and built.keep.when.in_steps)
    ):
        return "both"
    acting = (built.keep, built.reread, built.stack, built.read_prompt)
    return "none" if acting == (None,) * 4 else "prefill"


_BY_NAME = {function.__name__: function for function in METHODS.values()}


def __getattr__(name: str) -> MethodFunction:
    # Lets `from kvjax.methods import snapkv` find the functions of all families without a list of their
    # names.
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
    "as_method",
    "chain",
    "check_hyper",
    "method",
    "methods",
    "paper",
    "resolve",
    "takes",
    "takes_budget",
]
