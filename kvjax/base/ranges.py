"""Ranges of fields, declared in annotations: for Python, files and the command line alike.

A field declares `clip: Annotated[float, Range(0, above=True)]`, and `check_fields` checks it wherever the
dataclass is built.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from kvjax.base.errors import InputError

MOST = 2**31 - 1
# `read` returns this for a value that an annotation does not allow.
REFUSED = object()


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, both included.

    Args:
        least: the smallest.
        most: the largest.
        odd: only odd whole numbers.
        even: only even whole numbers.
        above: excludes `least` itself.
        below: excludes `most` itself.

    >>> Range(0, 1, above=True).above
    True
    """

    least: float | int
    most: float | int = math.inf
    odd: bool = False
    even: bool = False
    above: bool = False
    below: bool = False

    def holds(self, value: float | int) -> bool:
        over = self.least < value if self.above else self.least <= value
        under = value < self.most if self.below else value <= self.most
        return over and under and not (self.odd and value % 2 == 0) and not (self.even and value % 2)

    def __str__(self) -> str:
        if self.most == math.inf:
            return f"{'>' if self.above else '>='} {self.least}"
        return f"from {self.least} to {'below ' if self.below else ''}{self.most}"


@dataclasses.dataclass(frozen=True)
class CountOrShare(Range):
    """A whole number >= `least`, which is a count, or a fraction between 0 and 1, which is a share."""

    def holds(self, value: float | int) -> bool:
        return super().holds(value) if isinstance(value, int) else 0 < value < 1

    def __str__(self) -> str:
        return f">= {self.least} (int) or a share between 0 and 1 (float)"


@dataclasses.dataclass(frozen=True)
class Portion(Range):
    """A whole number >= `least`, which is a count, or a share in (0, 1]."""

    def holds(self, value: float | int) -> bool:
        return super().holds(value) if isinstance(value, int) else 0 < value <= 1

    def __str__(self) -> str:
        return f">= {self.least} (int) or a share in (0, 1] (float)"


class FieldError(InputError):
    """A field has a value that it does not allow; the message begins with the field's name."""


# A count that is at least one.
Count = Annotated[int, Range(1)]
# A number of things that may be 0, or an index.
Whole = Annotated[int, Range(0)]


class Annotation(NamedTuple):
    """An annotation taken apart: its plain type, whether None is allowed, and its rule."""

    base: Any
    optional: bool
    rule: Any


@cache
def taken_apart(annotation: Any) -> Annotation:
    """Split an annotation into its parts.

    >>> taken_apart(Annotated[int, CountOrShare(1)] | None)[:2]
    (<class 'int'>, True)
    """
    others = [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        others = [x for x in typing.get_args(annotation) if x is not type(None)]
        optional = len(others) < len(typing.get_args(annotation))
    else:
        optional = False
    base, rule = others[0] if len(others) == 1 else annotation, None
    if typing.get_origin(base) is Annotated:
        base, rule = typing.get_args(base)[:2]
    return Annotation(base, optional, rule)


def read(annotation: Any, value: Any) -> Any:
    """Return the value as Python's own type, or `REFUSED`; "true" and "false" are read as bools.

    Lists become tuples, NumPy's scalars Python's, and a whole number a float where one is expected. Whole
    numbers go up to 2^31 - 1 unless a range says otherwise. Other types of annotation allow every value.

    >>> read(bool, "false"), read(tuple[int, int], [1, 2]), read(int, 3.5) is REFUSED
    (False, (1, 2), True)
    """
    kind = taken_apart(annotation)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None and kind.optional:
        return None
    if typing.get_origin(kind.base) in (typing.Union, types.UnionType):
        return _of_union(kind, value)
    if typing.get_origin(kind.base) is Literal:
        found = (x for x in typing.get_args(kind.base) if type(x) is type(value) and x == value)
        return next(found, REFUSED)
    if kind.base is tuple or typing.get_origin(kind.base) is tuple:
        return _tuple(kind, value)
    if kind.base in (int, float):
        return number(kind.base, kind.rule, value)
    if kind.base is bool:
        value = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
        return value if isinstance(value, bool) else REFUSED
    if isinstance(kind.base, type) and kind.base is not Any:
        return value if isinstance(value, kind.base) else REFUSED
    return value


def number(base: Any, rule: Any, value: Any) -> Any:
    """Return a finite number within a range, or `REFUSED`; base: int, float, or a union of both."""
    if isinstance(value, bool) or not isinstance(value, int if base is int else int | float):
        return REFUSED
    if not math.isfinite(value) or (isinstance(rule, Range) and not rule.holds(value)):
        return REFUSED
    if isinstance(value, int) and abs(value) > MOST and getattr(rule, "most", math.inf) == math.inf:
        return REFUSED
    return base(value) if isinstance(base, type) else value


def _of_union(kind: Annotation, value: Any) -> Any:
    members = [x for x in typing.get_args(kind.base) if x is not type(None)]
    if set(members) == {int, float}:
        return number(kind.base, kind.rule, value)
    found = (read(x if kind.rule is None else Annotated[x, kind.rule], value) for x in members)
    return next((x for x in found if x is not REFUSED), REFUSED)


def _tuple(kind: Annotation, value: Any) -> Any:
    inner = typing.get_args(kind.base) or (Any, ...)
    if not isinstance(value, list | tuple | np.ndarray):
        return REFUSED
    of = inner[:1] * len(value) if inner[-1] is ... else inner
    if len(of) != len(value):
        return REFUSED
    each = [_inner(kind.rule, x, y) for x, y in zip(of, value, strict=True)]
    return REFUSED if any(x is REFUSED for x in each) else tuple(each)


def _inner(rule: Any, annotation: Any, value: Any) -> Any:
    if annotation is Any:
        return value
    annotation = annotation if rule is None else Annotated[annotation, rule]
    return value if _plainly_fits(taken_apart(annotation), value) else read(annotation, value)


def expected(annotation: Any) -> str:
    """Which values an annotation allows, in words.

    >>> expected(Annotated[int, Range(1, odd=True)] | None), expected(Annotated[float, Range(0, above=True)])
    ('an odd whole number >= 1, or None', 'a number > 0')
    """
    kind = taken_apart(annotation)
    text = _words(kind)
    return f"{text}, or None" if kind.optional else text


def _words(kind: Annotation) -> str:
    origin = typing.get_origin(kind.base)
    if origin is Literal:
        return f"one of {', '.join(map(repr, typing.get_args(kind.base)))}"
    if kind.base is tuple or origin is tuple:
        return _words_of_tuple(kind)
    if origin in (typing.Union, types.UnionType) and set(typing.get_args(kind.base)) - {
        int,
        float,
        type(None),
    }:
        members = [x for x in typing.get_args(kind.base) if x is not type(None)]
        return " or ".join(_words(taken_apart(x)) for x in members)
    plain = {bool: "True or False", str: "text"}
    if kind.base in plain:
        return plain[kind.base]
    if isinstance(kind.base, type) and kind.base not in (int, float):
        return f"a {kind.base.__name__}"
    which = (
        "an odd"
        if getattr(kind.rule, "odd", False)
        else "an even"
        if getattr(kind.rule, "even", False)
        else "a"
    )
    whole = "whole " if kind.base is int else ""
    return f"{which} {whole}number" + ("" if kind.rule is None else f" {kind.rule}")


def _words_of_tuple(kind: Annotation) -> str:
    inner = typing.get_args(kind.base) or (Any, ...)
    each = inner[:1] if inner[-1] is ... else inner
    each = [x if kind.rule is None else Annotated[x, kind.rule] for x in each]
    if inner[-1] is not ...:
        return f"a tuple of {len(inner)}: {', '.join(map(expected, each))}"
    one = expected(each[0])
    if one.startswith("a whole number"):
        return f"a tuple of whole numbers{one.removeprefix('a whole number')}"
    return f"a tuple, in which each is {one}"


class _Field(NamedTuple):
    """A field's name, its annotation, and the parts of the annotation."""

    name: str
    annotation: Any
    kind: Annotation


@cache
def _fields(of: type, whole: Range | None) -> tuple[_Field, ...]:
    hints, found = typing.get_type_hints(of, include_extras=True), []
    for field in dataclasses.fields(of):
        annotation, kind = hints[field.name], taken_apart(hints[field.name])
        if whole is not None and kind.base is int and kind.rule is None:
            plain: Any = Annotated[int, whole]
            annotation = plain | None if kind.optional else plain
        found.append(_Field(field.name, annotation, taken_apart(annotation)))
    return tuple(found)


def _plainly_fits(kind: Annotation, value: Any) -> bool:
    """Check fast whether a value has exactly its field's type and is within its range, as most are."""
    if value is None:
        return kind.optional
    if type(value) is not kind.base or kind.base not in (int, float, bool, str):
        return False
    if kind.base in (bool, str):
        return True
    return -MOST <= value <= MOST and (kind.rule is None or kind.rule.holds(value))


def check_fields(instance: Any, prefix: str = "", whole: Range | None = None) -> None:
    """Read every field of a frozen dataclass by its annotation, and keep it in Python's own type.

    prefix: what a user writes before a field's name. whole: the range of int fields that declare none.
    Raises FieldError that names the field, its value and what was expected.
    """
    for name, annotation, kind in _fields(type(instance), whole):
        given = getattr(instance, name)
        if _plainly_fits(kind, given):
            continue
        found = read(annotation, given)
        if found is REFUSED:
            wanted = expected(annotation) + _nearest(given, kind)
            raise FieldError(f"{prefix}{name} is {_short(given)}, expected {wanted}")
        if found is not given:
            object.__setattr__(instance, name, found)


def _nearest(given: Any, kind: Annotation) -> str:
    known = [x for x in typing.get_args(kind.base) if isinstance(x, str)]
    near = difflib.get_close_matches(given, known, 1) if isinstance(given, str) else []
    return f": did you mean {near[0]!r}?" if near else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
