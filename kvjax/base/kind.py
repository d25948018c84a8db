"""Kind: the base class of the kinds of words, whose classes say what a word must define and what it may."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any


class Kind:
    """The base class of a kind of words, which are frozen dataclasses.

    What a kind annotates without a value, and the methods that it marks as abstract, its words must define,
    as fields, class attributes or properties; for all else they inherit a default.
    """

    def __init_subclass__(cls, **more: Any) -> None:
        """A field that is declared without a default has none, whatever the kind's attribute of its name."""
        super().__init_subclass__(**more)
        for name in vars(cls).get("__annotations__", {}):
            of_words = any(name in vars(base).get("__dataclass_fields__", ()) for base in cls.__mro__)
            if name not in vars(cls) and hasattr(cls, name) and not of_words:
                setattr(cls, name, dataclasses.field())


@cache
def undefined(cls: type[Kind]) -> tuple[str, ...]:
    """The names of what the kinds of a class of words expect, and it does not define.

    >>> class Even(Kind):
    ...     most: int
    >>> undefined(Even)
    ('most',)
    """
    own = getattr(cls, "__dataclass_fields__", {})
    names = [name for base in cls.__mro__ for name in vars(base).get("__annotations__", ())]
    absent = [name for name in names if name not in own and not hasattr(cls, name)]
    abstract = [name for name in dir(cls) if getattr(getattr(cls, name), "__isabstractmethod__", False)]
    return (*absent, *abstract)
