"""Types of hyper-parameters: which values each may take, said once, in the signature of a method's function.

`window: Annotated[int, Range(1)]` is all that a method says; `checked` reads it wherever the method is built.
The types that many methods share have names in `kvjax.methods.shared`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from kvjax.errors import InputError
from kvjax.fitted import Fitted
from kvjax.grammar import Budget

_MOST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, both included; odd: only odd whole numbers."""

    least: float | int
    most: float | int = math.inf
    odd: bool = False

    def holds(self, value: float | int) -> bool:
        return self.least <= value <= self.most and not (self.odd and value % 2 == 0)

    def __str__(self) -> str:
        return f">= {self.least}" if self.most == math.inf else f"from {self.least} to {self.most}"


@dataclasses.dataclass(frozen=True)
class Part(Range):
    """A whole number >= `least`, which counts, or a fraction between 0 and 1, which is a share."""

    def holds(self, value: float | int) -> bool:
        return super().holds(value) if isinstance(value, int) else 0 < value < 1

    def __str__(self) -> str:
        return f">= {self.least} (int) or a share between 0 and 1 (float)"


@dataclasses.dataclass(frozen=True)
class Portion(Range):
    """A whole number >= `least`, which counts, or a share in (0, 1] of all there is."""

    def holds(self, value: float | int) -> bool:
        return super().holds(value) if isinstance(value, int) else 0 < value <= 1

    def __str__(self) -> str:
        return f">= {self.least} (int) or a share in (0, 1] (float)"


class _Type(NamedTuple):
    """An annotation taken apart: its plain type, whether None is allowed, and its rule."""

    base: Any
    optional: bool
    rule: Any


def _taken_apart(annotation: Any) -> _Type:
    others = [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        others = [x for x in typing.get_args(annotation) if x is not type(None)]
        optional = len(others) < len(typing.get_args(annotation))
    else:
        optional = False
    base, rule = others[0] if len(others) == 1 else annotation, None
    if typing.get_origin(base) is Annotated:
        base, rule = typing.get_args(base)[:2]
    return _Type(base, optional, rule)


def is_type(annotation: Any) -> bool:
    """Whether an annotation says which values a hyper-parameter may take.

    >>> is_type(Annotated[int, Range(1)]), is_type(Literal["paper", "kvpress"]), is_type(int)
    (True, True, False)
    """
    kind = _taken_apart(annotation)
    return kind.base is bool or typing.get_origin(kind.base) is Literal or kind.rule is not None


def value_of(annotation: Any, value: Any) -> Any:
    """The value of a hyper-parameter as Python's own type; NumPy's scalars are taken as Python's.

    Raises ValueError saying what was expected where the value is none of the type. An annotation that says
    nothing of values (see `is_type`) takes all.

    >>> value_of(Annotated[float, Range(0, 1)], 1)
    1.0
    """
    if isinstance(value, np.generic):
        value = value.item()
    kind = _taken_apart(annotation)
    if not is_type(annotation) or (value is None and kind.optional):
        return value
    if kind.rule is Budget:
        return Budget(value).amount  # type: ignore[arg-type]
    endless = isinstance(kind.rule, Range) and kind.rule.most == math.inf
    if endless and isinstance(value, int) and value > _MOST:
        raise ValueError(f"must be at most {_MOST}, as positions are, got {value!r}")
    found = _of_base(kind, value)
    if found is None:
        raise ValueError(f"must be {_expected(kind)}, got {value!r}")
    return found


def values_of(annotation: Any) -> str:
    """Which values an annotation says that a hyper-parameter may take, in words; "" where it says nothing.

    >>> values_of(Annotated[int, Range(1, odd=True)] | None)
    'an odd whole number >= 1, or None'
    """
    kind = _taken_apart(annotation)
    if not is_type(annotation):
        return ""
    if kind.rule is Budget:
        return "a share of the tokens in (0, 1], or a number of slots per head"
    return _expected(kind)


def _of_base(kind: _Type, value: Any) -> Any:
    """The value in the plain type of an annotation and within its range; None where it is not."""
    base, rule = kind.base, kind.rule
    if typing.get_origin(base) is Literal:
        return next((x for x in typing.get_args(base) if type(x) is type(value) and x == value), None)
    if typing.get_origin(base) is tuple:
        if not isinstance(value, list | tuple | np.ndarray):
            return None
        each = [
            _of_base(_Type(int, False, rule), x.item() if isinstance(x, np.generic) else x) for x in value
        ]
        return None if None in each else tuple(each)
    if base is bool:
        return value if isinstance(value, bool) else None
    if rule is Fitted:
        return value if isinstance(value, Fitted) or (isinstance(value, str) and value) else None
    if isinstance(value, bool) or not isinstance(value, int if base is int else int | float):
        return None
    if not math.isfinite(value) or (isinstance(rule, Range) and not rule.holds(value)):
        return None
    return base(value) if isinstance(base, type) else value


def _expected(kind: _Type) -> str:
    odd = "an odd" if getattr(kind.rule, "odd", False) else "a"
    if typing.get_origin(kind.base) is Literal:
        text = f"one of {', '.join(map(repr, typing.get_args(kind.base)))}"
    elif typing.get_origin(kind.base) is tuple:
        text = f"a tuple of whole numbers {kind.rule}"
    elif kind.base is bool:
        text = "True or False"
    elif kind.rule is Fitted:
        text = "the path of a file that `kvjax fit` wrote, or what kvjax.fit returned"
    else:
        text = f"{odd} {'whole ' if kind.base is int else ''}number {kind.rule}"
    return f"{text}, or None" if kind.optional else text


@cache
def types_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function's parameters, where they can be read."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError):
        return {}  # a user's annotations may name what is imported for a type checker alone


def checked(name: str, function: Callable[..., Any], hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters of a method's function, each in Python's own type and within its range.

    Raises InputError that names the method and the hyper-parameter for a value that is not.

    >>> from kvjax.methods import snapkv
    >>> checked("snapkv", snapkv, {"window": 8.5})
    Traceback (most recent call last):
    kvjax.errors.InputError: snapkv: window must be a whole number >= 1, got 8.5
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
    bound = inspect.signature(function).bind(*args, **hyper)
    for key, kind in inspect.signature(function).parameters.items():
        if key in bound.arguments and kind.kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD):
            bound.arguments |= checked(name, function, {key: bound.arguments[key]})
    return function(*bound.args, **bound.kwargs)
