"""A sentence as one would write it: words with what differs from their defaults, operators as such."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from kvjax.fitted import Fitted
from kvjax.keep.algebra import Pooled, Product, Scaled, Shifted, Sum

# Parts of a sentence are called by their names; of other words, fields without a default are not.
_NAMED = ("Method", "Keep", "Store")
_HIDDEN = ("spec",)


class _Call(NamedTuple):
    """A word or a tuple before it is laid out: what opens it, its arguments, what closes it.

    between: what stands between two arguments; of an operator, the operator.
    """

    start: str
    parts: tuple[tuple[str, _Call | str], ...]
    end: str
    between: str = ", "


def written(word: Any, columns: int = 100) -> str:
    """The Python expression that makes a word, in lines of at most `columns` characters if possible.

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


def _call(word: Any) -> _Call | str:
    match word:
        case Pooled():
            return _joined(word.score, ">>", word.pool)
        case Sum():
            return _joined(word.a, "+", word.b)
        case Product():
            return _joined(word.a, "*", word.b)
        case Shifted():
            return _joined(word.score, "+", word.by)
        case Scaled():
            return _joined(word.factor, "*", word.score)
        case tuple() if word and not hasattr(word, "_fields"):
            end = ",)" if len(word) == 1 else ")"
            return _Call("(", tuple(("", _call(one)) for one in word), end)
    if not dataclasses.is_dataclass(word) or isinstance(word, type | Fitted):
        return _quoted(word) if isinstance(word, str) else repr(word)
    name, parts = type(word).__name__, []
    for field in dataclasses.fields(word):
        value = getattr(word, field.name)
        if not field.init or field.name in _HIDDEN or _is_default(field, value):
            continue
        needed = field.default is field.default_factory is dataclasses.MISSING
        bare = needed and name not in _NAMED and all(not label for label, _ in parts)
        parts.append(("" if bare else f"{field.name}=", _call(value)))
    return _Call(f"{name}(", tuple(parts), ")")


def _quoted(text: str) -> str:
    """A text in double quotes, as the code of this project has them."""
    return repr(text) if '"' in text or "'" in text else f'"{repr(text)[1:-1]}"'


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default is not dataclasses.MISSING:
        return type(value) is type(field.default) and value == field.default
    factory = field.default_factory
    return factory is not dataclasses.MISSING and value == factory()


def _joined(a: Any, operator: str, b: Any) -> _Call:
    return _Call("", (("", _operand(a)), ("", _operand(b))), "", f" {operator} ")


def _operand(word: Any) -> _Call | str:
    call = _call(word)
    return _Call("(", (("", call),), ")") if isinstance(call, _Call) and not call.start else call


def _flat(call: _Call | str) -> str:
    if isinstance(call, str):
        return call
    return call.start + call.between.join(label + _flat(part) for label, part in call.parts) + call.end


def _laid_out(call: _Call | str, columns: int, label: str, depth: int) -> str:
    """A call on one line where it fits, otherwise each of its arguments on lines of its own."""
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
