"""The text of methods, taken apart: parts of a chain, names, arguments and values. Nothing is looked up."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvjax.base.errors import InputError

_CONSTANTS = {"true": True, "false": False, "none": None}
# The + between methods has a name after it, the one in 1e+3 a digit.
_NAME_AFTER = re.compile(r"\+\s*(?=[A-Za-z_./~'\"])")
# A + with a method, or the digit of an exponent, after it; any other + is refused.
_GOES_ON = re.compile(r"\+(\d|\s*[^\W\d]|\s*[./~'\"])")
_CALL = re.compile(r"[\w-]+\s*\(")
_FILE = re.compile(r"(?P<name>.+\.py:[^:]*)(:(?P<hyper>.*))?", re.DOTALL)
_OPENS, _CLOSES = "([{", ")]}"


class ChainPart(NamedTuple):
    """One part of a chain as written: its name, its arguments, and whether these are in brackets."""

    name: str
    given: str
    called: bool


def pieces(text: str) -> list[str]:
    """Split a chain into its parts. Raises InputError if a + lacks a method on one of its sides.

    >>> pieces("snapkv(budget=0.25) + ape:scale=1e+3+int8")
    ['snapkv(budget=0.25)', 'ape:scale=1e+3', 'int8']
    """
    signs = list(_outside(text, "+"))
    if signs and not text[: signs[0]].strip():
        raise InputError(f"{text!r} begins with a +, expected a method before it: write snapkv + kivi")
    if lonely := [at for at in signs if not _GOES_ON.match(text, at)]:
        where = "has a + without a method" if text[lonely[0] + 1 :].strip() else "ends with a +"
        raise InputError(f"{text!r} {where}, expected a method after it: write snapkv + kivi")
    cuts = [at for at in signs if _NAME_AFTER.match(text, at)]
    return [text[a + 1 : b].strip() for a, b in zip([-1, *cuts], [*cuts, len(text)], strict=True)]


def taken_apart(piece: str) -> ChainPart:
    """Split a part into name and arguments. Raises InputError if brackets or quotes do not match.

    >>> taken_apart("snapkv(budget=0.25)")
    ChainPart(name='snapkv', given='budget=0.25', called=True)
    >>> taken_apart("mine.py:short:window=3")
    ChainPart(name='mine.py:short', given='window=3', called=False)
    """
    name, after = _quoted(piece)
    # Brackets in a file's path open no call.
    at = after or (0 if _CALL.match(piece) else piece.find(".py:") + 1)
    # A call's closing bracket is at the end of the part.
    opened = [i for i in _outside(piece, "(", at) if _end(piece, i) == len(piece.rstrip()) - 1]
    if opened and "=" not in piece[at : opened[0]]:
        given = piece[opened[0] + 1 : piece.rstrip().rindex(")")].strip()
        return ChainPart(name or piece[: opened[0]].strip(), given.removesuffix(","), True)
    if after:
        return ChainPart(name, piece[after:].strip().removeprefix(":"), False)
    if (file := _FILE.fullmatch(piece)) is not None:
        found = ChainPart(file["name"], file["hyper"] or "", False)
    else:
        before, _, given = piece.partition(":")
        found = ChainPart(before.strip(), given, False)
    if set(found.name.rpartition("/")[2]) & set(_OPENS + _CLOSES):
        raise _unmatched(piece)
    return found


def arguments(given: str) -> list[str]:
    """Return the arguments between brackets, or after a colon.

    >>> arguments("contexts=(9, 8), scale=1.0,")
    ['contexts=(9, 8)', 'scale=1.0']
    """
    cuts = list(_outside(given, ","))
    parts = [given[a + 1 : b].strip() for a, b in zip([-1, *cuts], [*cuts, len(given)], strict=True)]
    return [part for part in parts if part]


def hyper_parameters(given: str, piece: str) -> dict[str, Any]:
    """Parse key=value pairs. Raises InputError for anything else, and for duplicates."""
    found: dict[str, Any] = {}
    for pair in arguments(given):
        key, equals, written = (x.strip() for x in pair.partition("="))
        if not (key.isidentifier() and equals and written):
            raise InputError(
                f"{pair!r} in {piece!r} is no hyper-parameter, expected key=value: write it like window=16"
            )
        if key in found:
            raise InputError(f"{key!r} is given twice in {piece!r}, expected once: remove one")
        found[key] = value(written)
    return found


def value(text: str) -> Any:
    """Parse a number, constant (true, false, none) or word; in brackets, several of them.

    >>> value("(1, 0.5, none)"), value("'a, b'"), value("paper")
    ((1, 0.5, None), 'a, b', 'paper')
    """
    if text[:1] in _OPENS and text[:1] and _end(text, 0) == len(text) - 1:
        return tuple(value(part) for part in arguments(text[1:-1]))
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    string, after = _quoted(text)
    return string if after == len(text) else text.strip("'\"")


def _unmatched(piece: str) -> InputError:
    return InputError(f"{piece!r} has a bracket too few or too many, expected one pair: write id(key=value)")


def _quoted(text: str) -> tuple[str, int]:
    """Return the text in the quotes that begin `text`, and the index after them; ("", 0) without quotes."""
    if text[:1] not in ("'", '"') or (end := _end(text, 0)) < 0:
        return "", 0
    try:
        return str(ast.literal_eval(text[: end + 1])), end + 1
    except (ValueError, SyntaxError):
        return text[1:end], end + 1


def _end(text: str, start: int) -> int:
    """Find the index where the bracket or quote at `start` closes; -1 if it does not."""
    if text[start] in "'\"":
        at = start + 1
        while at < len(text) and text[at] != text[start]:
            at += 2 if text[at] == "\\" else 1
        return at if at < len(text) else -1
    at, wanted = start, []
    while at < len(text):
        if text[at] in "'\"" and _begins(text, at):
            at = _end(text, at)
            if at < 0:
                return -1
        elif text[at] in _OPENS:
            wanted.append(_CLOSES[_OPENS.index(text[at])])
        elif text[at] in _CLOSES:
            if wanted.pop() != text[at]:
                return -1
            if not wanted:
                return at
        at += 1
    return -1


def _begins(text: str, at: int) -> bool:
    """Whether the quote at index `at` begins a string; a quote inside a word is a letter of the word."""
    return not text[:at].rstrip() or text[:at].rstrip()[-1] in "=,+" + _OPENS


def _outside(text: str, sign: str, start: int = 0) -> Iterator[int]:
    """Yield the indices of a sign outside brackets and quotes. Raises InputError if these do not match."""
    at = start
    while at < len(text):
        if text[at] == sign:
            yield at
        opens = text[at] in _OPENS or (text[at] in "'\"" and _begins(text, at))
        if text[at] in _CLOSES or (opens and (end := _end(text, at)) < 0):
            raise _unmatched(text)
        at = end + 1 if opens else at + 1
