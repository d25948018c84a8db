"""Types of hyper-parameters: the allowed values of each, in the signature of a method's function.

`window: Annotated[int, Range(1)]` is all that a method declares; `checked` applies it wherever the method is
built. Types that many methods share have names in `kvjax.methods.shared`.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

import numpy as np

from kvjax.base.errors import InputError
from kvjax.base.ranges import (
    MOST,
    REFUSED,
    Annotation,
    CountOrShare,
    Portion,
    Range,
    expected,
    read,
    taken_apart,
)
from kvjax.grammar import Budget
from kvjax.grammar.fitted import Fitted

__all__ = [
    "CountOrShare", "Portion", "Range", "call_checked", "checked", "is_type", "types_of", "value_of",
    "values_of",
]  # fmt: skip


def is_type(annotation: Any) -> bool:
    """Whether an annotation declares a hyper-parameter's allowed values.

    >>> from typing import Annotated
    >>> is_type(Annotated[int, Range(1)]), is_type(Literal["paper", "kvpress"]), is_type(int)
    (True, True, False)
    """
    kind = taken_apart(annotation)
    return kind.base is bool or typing.get_origin(kind.base) is Literal or kind.rule is not None


def value_of(annotation: Any, value: Any) -> Any:
    """Convert the value of a hyper-parameter to Python's own type; NumPy scalars are converted, too.

    Raises ValueError, with the expected values, if the value is not of the type. An annotation without
    allowed values (see `is_type`) accepts all.

    >>> from typing import Annotated
    >>> value_of(Annotated[float, Range(0, 1)], 1)
    1.0
    """
    if isinstance(value, np.generic):
        value = value.item()
    kind = taken_apart(annotation)
    if not is_type(annotation) or (value is None and kind.optional):
        return value
    if kind.rule is Budget:
        return Budget(value).amount  # type: ignore[arg-type]
    endless = isinstance(kind.rule, Range) and kind.rule.most == math.inf
    if endless and isinstance(value, int) and value > MOST:
        raise ValueError(f"must be at most {MOST}, as positions are, got {value!r}")
    found = _of_kind(kind, annotation, value)
    if found is REFUSED:
        raise ValueError(f"must be {_expected(kind, annotation)}, got {value!r}")
    return found


def values_of(annotation: Any) -> str:
    """Describe an annotation's allowed values, in words; "" if it declares none.

    >>> from typing import Annotated
    >>> values_of(Annotated[int, Range(1, odd=True)] | None)
    'an odd whole number >= 1, or None'
    """
    kind = taken_apart(annotation)
    if not is_type(annotation):
        return ""
    if kind.rule is Budget:
        return "a share of the tokens in (0, 1], or a number of slots per head"
    return _expected(kind, annotation)


def _of_kind(kind: Annotation, annotation: Any, value: Any) -> Any:
    if kind.rule is Fitted:
        return value if isinstance(value, Fitted) or (isinstance(value, str) and value) else REFUSED
    if kind.base is bool and not isinstance(value, bool):
        return REFUSED
    return read(annotation, value)


def _expected(kind: Annotation, annotation: Any) -> str:
    if kind.rule is not Fitted:
        return expected(annotation)
    text = "the path of a file that `kvjax fit` wrote, or what kvjax.fit returned"
    return f"{text}, or None" if kind.optional else text


@cache
def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return a function's signature, which costs as much as the rest of a method's checks."""
    return inspect.signature(function)


@cache
def types_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function's parameters, if they can be resolved."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError):
        return {}  # a user's annotations may name things imported only for a type checker


def checked(name: str, function: Callable[..., Any], hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters of a method's function, each in Python's own type and within its range.

    Raises InputError, with the method and the hyper-parameter, for a value that is not allowed.

    >>> from kvjax.methods import snapkv
    >>> checked("snapkv", snapkv, {"window": 8.5})
    Traceback (most recent call last):
    kvjax.InputError: snapkv: window must be a whole number >= 1, got 8.5
    """
    known, found = types_of(function), {}
    for key, value in hyper.items():
        try:
            found[key] = value_of(known[key], value) if key in known else value
        except ValueError as error:
            # A budget's message begins with its name.
            text = str(error)
            raise InputError(f"{name}: {text}" if text.startswith(key) else f"{name}: {key} {text}") from None
    return found


def call_checked(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], hyper: dict[str, Any]
) -> Any:
    """function(*args, **hyper) with values as `checked` gives them."""
    signature = signature_of(function)
    bound = signature.bind(*args, **hyper)
    for key, kind in signature.parameters.items():
        if key in bound.arguments and kind.kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD):
            bound.arguments |= checked(name, function, {key: bound.arguments[key]})
    return function(*bound.args, **bound.kwargs)
