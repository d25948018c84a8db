"""A decorator for functions that make a method of others: they take texts, and the result prints as one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from kvjax.grammar import Method
from kvjax.grammar.to_text import NAMELESS
from kvjax.methods.functions import AROUND, MethodWrapper
from kvjax.methods.parse import as_method

Function = TypeVar("Function", bound=Callable[..., Method])


def around(*methods: str, several: str = "") -> Callable[[Function], Function]:
    """Wrap a function whose methods have a spec that builds them again, if its arguments have one.

    methods: names of the arguments that are methods. several: name of the argument that is a list of methods.
    Both may be given as texts.

    >>> import kvjax
    >>> half = kvjax.per_layer("snapkv(budget=0.5)", (1, 0.5))
    >>> half, half == kvjax.method(repr(half))
    (per_layer(snapkv(budget=0.5), shares=(1, 0.5)), True)
    """
    names = (*methods, several) if several else methods

    def attach(function: Function) -> Function:
        parameters = inspect.signature(function).parameters

        @functools.wraps(function)
        def named(*args: Any, **given: Any) -> Method:
            bound = inspect.signature(function).bind(*args, **given)
            bound.apply_defaults()
            for name in names:
                bound.arguments[name] = _read(bound.arguments[name], name == several)
            made = function(*bound.args, **bound.kwargs)
            specs = {name: _spec(bound.arguments[name]) for name in names}
            if None in specs.values():
                return made
            rest = tuple(
                (name, _plain(value))
                for name, value in bound.arguments.items()
                if name not in names and value is not parameters[name].default
            )
            ids = ", ".join(map(_ids, specs.values()))
            spec = ("around", function.__name__, tuple(specs.items()), rest)
            return made.called((f"{function.__name__}({ids})", spec))

        AROUND[function.__name__] = MethodWrapper(named, names)
        return named  # type: ignore[return-value]

    return attach


def _read(given: Any, several: bool) -> Any:
    """Texts as methods; anything else is passed on, and the function refuses it if it must."""
    if several:
        return [_read(one, False) for one in given] if isinstance(given, list | tuple) else given
    return as_method(given) if isinstance(given, str) else given


def _ids(spec: Any) -> str:
    return spec[0] if isinstance(spec[0], str) else ", ".join(dict.fromkeys(one[0] for one in spec))


def _spec(given: Any) -> tuple[Any, ...] | None:
    """Return the spec of a method, or of several; None if one has no name."""
    if isinstance(given, list):
        specs = tuple(_spec(one) for one in given)
        return None if None in specs else specs
    given = Method() if given is None else given
    return None if given.spec[0] in NAMELESS else given.spec


def _plain(value: Any) -> Any:
    """Write a value in plain Python types, which a text can hold."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value
