"""Methods as Python text: constructors with arguments that differ from defaults, or names of methods."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kvjax.base.errors import InputError
from kvjax.grammar.fitted import Fitted

# These classes name all arguments; others take fields without a default by position.
_NAMED = ("Method", "Keep", "Store")
# Ids of methods that no name builds.
NAMELESS = ("custom", "decode")
# Specs of methods without a given name.
_UNSAID = (("custom", ()), ("full", ()))


class _Call(NamedTuple):
    """A word or a tuple before line breaks: its opening text, its arguments, its closing text.

    between: the text between two arguments; for an operator, the operator.
    """

    start: str
    parts: tuple[tuple[str, _Call | str], ...]
    end: str
    between: str = ", "


def written(word: Any, columns: int = 100) -> str:
    """Write the Python expression that builds a word, in lines of at most `columns` characters if possible.

    A word built by an operator has `infix`: the names of its operands, the operator between them.

    >>> from kvjax.methods import method
    >>> print(written(method("tova", budget=0.25)))
    Method(
        keep=Keep(
            score=WindowAttention(1, heads="layer", hide_window=False),
            budget=Budget(0.25),
            allocate=Uniform(),
            when=Every(),
        ),
    )
    """
    return _laid_out(_call(word), columns, "", 0)


def constructor(word: Any) -> str:
    """Write the expression that builds an equal word, in one line.

    Unlike `written`, it includes a method's `spec` where the words alone would give another one.
    """
    return _flat(_call(word, specs=True))


def _call(word: Any, specs: bool = False) -> _Call | str:
    if isinstance(word, tuple) and word and not hasattr(word, "_fields"):
        end = ",)" if len(word) == 1 else ")"
        return _Call("(", tuple(("", _call(one, specs)) for one in word), end)
    if not dataclasses.is_dataclass(word) or isinstance(word, type | Fitted):
        return _literal(word)
    if infix := getattr(word, "infix", None):
        a, operator, b = infix
        return _joined(getattr(word, a), operator, getattr(word, b), specs)
    name, parts = type(word).__name__, []
    for field in dataclasses.fields(word):
        value = getattr(word, field.name)
        if not field.init or _is_default(field, value):
            continue
        if field.name == "spec" and (not specs or value in _UNSAID):
            continue
        needed = field.default is field.default_factory is dataclasses.MISSING and not field.kw_only
        bare = needed and name not in _NAMED and all(not label for label, _ in parts)
        parts.append(("" if bare else f"{field.name}=", _call(value, specs)))
    return _Call(f"{name}(", tuple(parts), ")")


def _literal(value: Any) -> str:
    """Write a plain value; strings are in double quotes, as in the code of this project."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if not isinstance(value, str) or '"' in value or "'" in value:
        return repr(value)
    return f'"{repr(value)[1:-1]}"'


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default is not dataclasses.MISSING:
        return type(value) is type(field.default) and value == field.default
    factory = field.default_factory
    return factory is not dataclasses.MISSING and value == factory()


def _joined(a: Any, operator: str, b: Any, specs: bool) -> _Call:
    return _Call("", (("", _operand(a, specs)), ("", _operand(b, specs))), "", f" {operator} ")


def _operand(word: Any, specs: bool) -> _Call | str:
    call = _call(word, specs)
    return _Call("(", (("", call),), ")") if isinstance(call, _Call) and not call.start else call


def _flat(call: _Call | str) -> str:
    if isinstance(call, str):
        return call
    return call.start + call.between.join(label + _flat(part) for label, part in call.parts) + call.end


def _laid_out(call: _Call | str, columns: int, label: str, depth: int) -> str:
    """Write a call on one line if it fits, otherwise with each of its arguments on lines of its own."""
    flat = label + _flat(call)
    if isinstance(call, str) or not call.parts or len(flat) + 4 * depth + 1 <= columns:
        return flat
    inner, outer = "    " * (depth + 1), "    " * depth
    if not call.start:
        first, *others = (_flat(part) for _, part in call.parts)
        lines = [first, *(call.between.lstrip() + other for other in others)]
        return "\n".join([f"{label}(", *(inner + line for line in lines), f"{outer})"])
    parts = [_laid_out(part, columns, name, depth + 1) for name, part in call.parts]
    lines = [f"{inner}{part}," for part in parts]
    return "\n".join([label + call.start, *lines, outer + call.end.lstrip(",")])


# --- names --------------------------------------------------------------------------------------------

# A spec (`kvjax.grammar.Method.spec`) is one of
#     (id, ((name, value), ...))             a method and its hyper-parameters
#     (ids, ("chain", spec, ...))            a chain
#     (ids, ("around", function, ((name, spec or (spec, ...)), ...), ((name, value), ...)))
#                                            what a function such as kvjax.per_layer makes of methods
#     ("custom", (text, ))                   the words themselves, in a file


def name_of(spec: tuple[Any, ...]) -> str:
    """Write the text that builds a spec's method again, for `kvjax.method` or `--method`.

    >>> name_of(("snapkv + int8", ("chain", ("snapkv", (("budget", 0.5),)), ("int8", ()))))
    'snapkv(budget=0.5) + int8'
    """
    match spec:
        case (str(), ("chain", *parts)):
            return " + ".join(map(name_of, parts))
        case (str(), ("around", str() as function, methods, given)):
            each = [name_of(x) if _is_spec(x) else f"[{', '.join(map(name_of, x))}]" for _, x in methods]
            return f"{function}({', '.join([*each, *_given(given)])})"
        case ("custom", (str() as text,)):
            return text
        case (str() as name, hyper):
            plain = not set(name) & set("'\"+()[], ") and not name.endswith(":")
            name = name if plain else repr(name)
            return f"{name}({', '.join(_given(hyper))})" if hyper else name
    raise InputError(f"{spec!r:.80} names no method, expected what kvjax.save_cache wrote")


def name_with(name: str, hyper: tuple[Any, ...]) -> str:
    """Write a method's name with its hyper-parameters in parentheses; a file's path is quoted if needed."""
    name = repr(name) if set(name) & set("'\"+()[]{},= ") else name
    return f"{name}({', '.join(_given(hyper))})" if hyper else name


def _given(hyper: tuple[Any, ...]) -> list[str]:
    return [f"{name}={value!r}" for name, value in hyper]


def _is_spec(x: tuple[Any, ...]) -> bool:
    return isinstance(x[0], str)


def parts_of(spec: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the specs of the methods that a spec names, each with its hyper-parameters.

    >>> [name for name, _ in parts_of(("a + b", ("chain", ("a", ()), ("b", ()))))]
    ['a', 'b']
    """
    found: list[tuple[Any, ...]] = []
    changed(spec, lambda part: found.append(part) or part)
    yield from found


def changed(spec: tuple[Any, ...], change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> tuple[Any, ...]:
    """Apply `change` to every part of the spec that names one method."""
    match spec:
        case (str() as id, ("chain", *parts)):
            return id, ("chain", *(changed(part, change) for part in parts))
        case (str() as id, ("around", function, methods, given)):
            each = tuple(
                (name, changed(x, change) if _is_spec(x) else tuple(changed(y, change) for y in x))
                for name, x in methods
            )
            return id, ("around", function, each, given)
    return change(spec)
