"""Methods written as constructors, parsed from text: `Method(keep=Keep(...))` of the library's own words.

Literals, names of kvjax's words, and operators between words are parsed; nothing is evaluated.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import operator
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import kvjax.grammar.phase
import kvjax.grammar.sentence
import kvjax.grammar.shared_ranges
import kvjax.grammar.stages
import kvjax.grammar.when
import kvjax.keep
import kvjax.make
import kvjax.place
import kvjax.read
import kvjax.store
from kvjax.base.errors import InputError
from kvjax.grammar import Method
from kvjax.grammar.fitted import SHIPPED, Fitted, as_fitted
from kvjax.grammar.to_text import constructor
from kvjax.methods.registry import FILES
from kvjax.methods.renamed import RENAMED

_ROOMS = (kvjax.keep, kvjax.make, kvjax.place, kvjax.read, kvjax.store)
_GRAMMAR = (
    kvjax.grammar.sentence, kvjax.grammar.phase, kvjax.grammar.shared_ranges, kvjax.grammar.stages,
    kvjax.grammar.when,
)  # fmt: skip
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.RShift: operator.rshift,
}
# A sentence is a few hundred characters.
_LONGEST = 20_000


def constructed(text: str) -> Method:
    """Build the method that a constructor's text describes.

    Raises InputError for unknown names, for anything but calls of kvjax's words with literals, and for values
    that a word rejects.

    >>> constructed("Method(keep=Keep(score=KeyNorm(), budget=Budget(0.25), allocate=Uniform()))").keep.budget
    Budget(amount=0.25)
    """
    found = constructed_word(text)
    if not isinstance(found, Method):
        raise InputError(f"{text!r:.80} makes {type(found).__name__}, expected Method(keep=Keep(...))")
    return found


def constructed_word(text: str) -> Any:
    """Build the word that a constructor's text describes, with the errors of `constructed`."""
    if len(text) > _LONGEST:
        raise InputError(f"a constructor of {len(text)} characters is longer than any sentence ({_LONGEST})")
    try:
        return _made(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, InputError):
            raise
        what = str(error) if isinstance(error, ValueError) else "it is no Python expression"
        raise InputError(f"{text!r:.80} cannot be read: {what}: write Method(keep=Keep(...))") from error


def constructor_of(method: Method) -> str:
    """Write the text from which `constructed` rebuilds the method.

    Raises InputError if it has user-defined words, fitted arrays that are in no file, or values that
    cannot be written as text.
    """
    text = constructor(method)
    try:
        same = constructed(text) == method
    except InputError as error:
        raise InputError(f"{method.id} has no text: {error}") from error
    if not same:
        raise InputError(f"{method.id} has no text: {text!r:.80} makes another method")
    return text


@cache
def classes() -> dict[str, type]:
    """List the words of kvjax by their names."""
    names = [
        found.name for room in _ROOMS for found in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
    ]
    modules: list[ModuleType] = [*map(importlib.import_module, sorted(names)), *_GRAMMAR, *FILES]
    return {
        name: found
        for module in modules
        for name, found in vars(module).items()
        if dataclasses.is_dataclass(found)
        and isinstance(found, type)
        and found.__module__ == module.__name__
        and found.__dataclass_params__.frozen  # type: ignore[attr-defined]
        and not name.startswith("_")
    }


def _made(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return tuple(map(_made, parts))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _joined(_made(left), type(sign), _made(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            return _called(name, [*map(_made, args)], {k.arg: _made(k.value) for k in keywords})
    what = ast.unparse(node)
    raise InputError(f"{what!r:.80} is no word of kvjax and no plain value, expected words with literals")


def _joined(a: Any, sign: type, b: Any) -> Any:
    if not any(type(x).__name__ in classes() for x in (a, b)):
        raise InputError(f"an operator stands between {a!r:.40} and {b!r:.40}, expected words")
    try:
        return _OPERATORS[sign](a, b)
    except (TypeError, AttributeError) as error:
        raise InputError(f"{a!r:.40} and {b!r:.40} cannot be joined so: {error}") from error


def _called(name: str, args: list[Any], given: dict[str | None, Any]) -> Any:
    if name == "float" and args in (["inf"], ["-inf"], ["nan"]) and not given:
        return float(args[0])
    if name == "Fitted":
        return _fitted(*args[:1])
    if name not in classes():
        name = RENAMED.get(name, name)
    if name not in classes():
        near = difflib.get_close_matches(name, classes(), 1)
        hint = f"did you mean {near[0]}?" if near else "one of your own is named as my_file.py:my_method"
        raise InputError(f"{name} is no word of kvjax: {hint}")
    try:
        return classes()[name](*args, **given)  # type: ignore[arg-type]
    except (TypeError, AttributeError) as error:
        raise InputError(f"{name} cannot be made so: {error}") from error


def _fitted(digest: Any = "") -> Fitted:
    """Arrays that come with kvjax, by their digest."""
    if (found := _shipped().get(str(digest))) is not None:
        return found
    raise InputError(
        f"the fitted arrays {digest!r} do not come with kvjax: save them with kvjax.save_fitted, and name "
        "the method of the library with fitted=FILE"
    )


@cache
def _shipped() -> dict[str, Fitted]:
    names = (f"{file.parent.name}/{file.stem}" for file in sorted(SHIPPED.glob("*/*.safetensors")))
    found = [fitted for name in names if (fitted := as_fitted(name)) is not None]
    return {fitted.digest: fitted for fitted in found}
