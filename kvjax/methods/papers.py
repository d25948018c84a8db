"""The facts about a method's paper: `@paper(...)` attaches them to the method's function."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from kvjax.grammar import Method
from kvjax.methods.parameters import call_checked

Exact = Literal["equal", "deviates", ""]


class Press(NamedTuple):
    """The class of kvpress that corresponds to a method.

    Args:
        name: of the class.
        hyper: hyper-parameters, in the command line's form, with which the method does the same.
        same: whether both give every token the same score and keep the same tokens.

    >>> Press("SnapKVPress").same
    'yes'
    """

    name: str
    hyper: str = ""
    same: str = "yes"


@dataclasses.dataclass(frozen=True)
class Paper:
    """Where a method was published, and how it relates to what was published; arxiv is "" for baselines.

    exact: "equal" if it computes the paper's equations, so that only rounding differs; "deviates" if the
    docstring lists differences after the word "Deviation"; "" without a paper.
    """

    id: str
    title: str
    family: str
    arxiv: str = ""
    exact: Exact = ""
    kvpress: Press | None = None
    aliases: tuple[str, ...] = ()

    def __post_init__(self):
        if self.arxiv and not re.fullmatch(r"\d{4}\.\d{5}", self.arxiv):
            raise ValueError(f"{self.id}: arxiv must be an id such as '2404.14469', got {self.arxiv!r}")
        known = ("equal", "deviates") if self.arxiv else ("",)
        if self.exact not in known:
            where = "with an arxiv id" if self.arxiv else "without an arxiv id"
            raise ValueError(
                f"{self.id}: exact must be {' or '.join(map(repr, known))} {where}, got {self.exact!r}"
            )

    @property
    def year(self) -> int | None:
        """The year in the arXiv id."""
        return 2000 + int(self.arxiv[:2]) if self.arxiv else None


@runtime_checkable
class MethodFunction(Protocol):
    """A function that `paper` has marked: hyper-parameters -> Method."""

    __name__: str
    paper: Paper

    def __call__(self, *args: Any, **hyper: Any) -> Method: ...


Function = TypeVar("Function", bound=Callable[..., Method])


def paper(
    title: str,
    *,
    family: str,
    arxiv: str = "",
    exact: Exact = "",
    kvpress: str | Press | None = None,
    aliases: tuple[str, ...] = (),
    id: str = "",
) -> Callable[[Function], Function]:
    """Register a function as a method, with the facts about its paper; its calls check hyper-parameters.

    Args:
        title: the paper's title.
        family: the group of methods that `kvjax methods` lists it in.
        arxiv: its id, "2404.14469".
        exact: how the function compares with the paper (see `Paper`).
        kvpress: the class of kvpress that does the same, or a `Press`.
        aliases: other ids of the method.
        id: by default the function's name with "-" for "_".

    Returns:
        A decorator, which sets `function.paper`. A value outside the range that a parameter's annotation
        gives (`kvjax.methods.parameters`) is an InputError.

    Raises:
        ValueError: for an arXiv id of another form, or an `exact` that `Paper` does not know.

    >>> from kvjax.grammar import Method
    >>> @paper("Full cache", family="baseline")
    ... def every_token(): return Method()
    >>> every_token.paper.id
    'every-token'
    """

    def attach(function: Function) -> Function:
        press = Press(kvpress) if isinstance(kvpress, str) else kvpress
        name = id or function.__name__.replace("_", "-")
        record = Paper(name, title, family, arxiv, exact, press, aliases)

        @functools.wraps(function)
        def checked(*args: Any, **hyper: Any) -> Method:
            return call_checked(name, function, args, hyper)

        checked.paper = record  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return attach


def collect(*modules: ModuleType) -> dict[str, MethodFunction]:
    """Collect the marked functions that modules define (not those they import), by id, in the files' order.

    Raises ValueError if two of them share an id or an alias.
    """
    found: dict[str, MethodFunction] = {}
    taken: set[str] = set()
    for module in modules:
        for function in vars(module).values():
            record = getattr(function, "paper", None)
            if not isinstance(record, Paper) or function.__module__ != module.__name__:
                continue
            for name in (record.id, *record.aliases):
                if name in taken:
                    raise ValueError(f"{module.__name__}: another method has the id or alias {name!r}")
                taken.add(name)
            found[record.id] = function
    return found
