"""`paper`: marks a function as a serving system, with the facts about its paper."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from kvjax.serve.grammar import System


class SystemPaper(NamedTuple):
    """The facts about a system: its id, title, arXiv id ("" without one), claim, and the claim's test.

    claim: the direction of the paper's claim that the simulator confirms. reverses: where it does not hold.
    """

    id: str
    title: str
    arxiv: str
    claim: str
    reverses: str
    tested: str

    @property
    def url(self) -> str:
        return f"https://arxiv.org/abs/{self.arxiv}" if self.arxiv else ""


@runtime_checkable
class SystemFunction(Protocol):
    """A function that `paper` has marked: numbers -> System."""

    __name__: str
    paper: SystemPaper

    def __call__(self, **numbers: int) -> System: ...


Function = TypeVar("Function", bound=Callable[..., System])


def paper(
    title: str, *, arxiv: str = "", claim: str, reverses: str, tested: str
) -> Callable[[Function], Function]:
    """Register a function as a system. Its id is its name with "-" for "_".

    Raises ValueError for an arXiv id of another form.

    >>> @paper("A title", claim="it is faster", reverses="for one request", tested="test_name")
    ... def my_system(): return System()
    >>> my_system.paper.id
    'my-system'
    """
    if arxiv and not re.fullmatch(r"\d{4}\.\d{5}", arxiv):
        raise ValueError(f"arxiv={arxiv!r}, expected an id such as 2309.06180")

    def attach(function: Function) -> Function:
        name = function.__name__.replace("_", "-")
        function.paper = SystemPaper(name, title, arxiv, claim, reverses, tested)  # type: ignore[attr-defined]
        return function

    return attach


def collect(*modules: ModuleType) -> dict[str, SystemFunction]:
    """Collect the marked functions that modules define, by id, in the order of the files."""
    return {
        one.paper.id: one
        for module in modules
        for one in vars(module).values()
        if isinstance(getattr(one, "paper", None), SystemPaper) and one.__module__ == module.__name__
    }
