"""The suite; its folders mirror the package. Helpers that several tests share import as `tests.<name>`."""

import functools
import inspect
import typing

import jaxtyping
from beartype import BeartypeConf, beartype

_check = beartype(conf=BeartypeConf(violation_type=TypeError))
_with_lengths = functools.partial(jaxtyping.jaxtyped, typechecker=None)


def checked(function):
    """Check annotations of arrays at each call; `tests.bytecode` puts it around all of kvjax.

    It replaces `jaxtyping.jaxtyped`, which checks the arguments of each call twice. Functions without arrays
    are left to pyright, since lengths and dtypes alone need a run: their checks take a tenth of the time.
    Classes are left alone: JAX rebuilds registered dataclasses through their constructors with placeholders
    for leaves (`object()`, shapes, shardings), which no array annotation admits. The check is made at the
    first call, because one process of tests calls few of the functions.
    """
    if function.__name__ == "__init__":
        return function
    check = None

    @functools.wraps(function)
    def first(*args, **kwargs):
        nonlocal check
        check = check or _checking(function)
        return check(*args, **kwargs)

    return first


def _checking(function):
    hints = {name: _hint(function, name) for name in function.__annotations__}
    lengths = any(map(_has_lengths, hints.values()))
    if not lengths and not any(map(_has_array, hints.values())):
        return function
    function.__annotations__ = hints
    check = _check(function)
    return _with_lengths(check) if lengths else check


def _hint(function, name):
    """Find the type that an annotation names; Any for none, as for a name that type checkers import."""
    alone = type("Alone", (), {"__annotations__": {name: function.__annotations__[name]}})
    try:
        return typing.get_type_hints(alone, function.__globals__, include_extras=True)[name]
    except NameError:
        return typing.Any


def _has_lengths(hint):
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_has_lengths, typing.get_args(hint)))


def _has_array(hint):
    return hint is jaxtyping.Array or any(map(_has_array, typing.get_args(hint)))
