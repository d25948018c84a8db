"""Kind: the base class of the kinds of words, whose classes say what a word must define and what it may."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar


class Kind:
    """The base class of a kind of words, which are frozen dataclasses.

    What a kind annotates without a value, and the methods that it marks as abstract, its words must define,
    as fields, class attributes or properties; for all else they inherit a default. `former`: names that
    methods had in earlier versions, and what they are called.
    """

    former: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, **more: Any) -> None:
        """Leave a field without a default, although the kind may have an attribute of that name."""
        super().__init_subclass__(**more)
        for name in vars(cls).get("__annotations__", {}):
            of_words = any(name in vars(base).get("__dataclass_fields__", ()) for base in cls.__mro__)
            if name not in vars(cls) and hasattr(cls, name) and not of_words:
                setattr(cls, name, dataclasses.field())


@cache
def expected(kind: type[Kind]) -> tuple[str, ...]:
    """Return the names that a kind itself, not those it inherits from, expects its words to define.

    >>> class Even(Kind):
    ...     most: int
    ...     least: int = 0
    >>> expected(Even)
    ('most',)
    """
    own = vars(kind)
    annotated = [name for name in own.get("__annotations__", ()) if name not in own]
    return (*annotated, *(name for name, x in own.items() if getattr(x, "__isabstractmethod__", False)))


@cache
def undefined(cls: type[Kind]) -> tuple[str, ...]:
    """Return the names of what the kinds of a class of words expect, and it does not define."""
    kinds = [base for base in cls.__mro__ if issubclass(base, Kind) and not dataclasses.is_dataclass(base)]
    return tuple(name for kind in kinds for name in expected(kind) if not _defines(cls, name))


@cache
def unstated(cls: type[Kind], kind: type[Kind]) -> type[Kind] | None:
    """Return the subclass of a kind whose methods a class all defines without subclassing it, or None."""
    for special in kind.__subclasses__():
        if special.__module__ == kind.__module__ and not dataclasses.is_dataclass(special):
            if issubclass(cls, special):
                found = unstated(cls, special)
            else:
                names = expected(special)
                found = special if names and all(_defines(cls, name) for name in names) else None
            if found is not None:
                return found
    return None


def _defines(cls: type[Kind], name: str) -> bool:
    """Whether a class of words has a field, an attribute or a method of its own of this name."""
    found = getattr(cls, name, None)
    fields = getattr(cls, "__dataclass_fields__", {})
    return name in fields or (hasattr(cls, name) and not getattr(found, "__isabstractmethod__", False))


def tell_shares_from_numbers(name: str, *words: type[Kind]) -> None:
    """Let words be unequal if one has a number and the other a share in a field, though 1 == 1.0.

    Programs are compiled once for equal words.

    >>> from kvjax.words import Recent
    >>> Recent(1) == Recent(1.0), Recent(1) == Recent(1)
    (False, True)
    """
    for word in words:
        word.__eq__ = _with_types(word.__eq__, name)  # type: ignore[method-assign]


def _with_types(equal: Callable[[Any, object], Any], name: str) -> Callable[[Any, object], Any]:
    def also_types(a: Any, b: object) -> Any:
        found = equal(a, b)
        return found if found is not True else type(getattr(a, name)) is type(getattr(b, name))

    return also_types
