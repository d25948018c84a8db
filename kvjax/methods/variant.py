"""Published variants of one method are configurations of one function; this picks among them."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def pick(variant: str, **known: T) -> T:
    """The entry of `known` named `variant`.

    >>> pick("paper", paper=1, kvpress=2)
    1
    """
    if variant not in known:
        raise ValueError(f"variant must be one of {', '.join(map(repr, known))}, got {variant!r}")
    return known[variant]
