"""The digest of a method's source, by which the board knows which lines are due again."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from kvjax.grammar import Method
from kvjax.methods import METHODS

# Names in words' classes that only describe the word to users or to other words.
SAID = ("requires", "breaks", "says", "settings")
# Names of the code, by which lines of the data know them: a new name alone changes no result.
FORMER = {
    "AccumulatingObservation": "Joining",
    "CodecArrays": "Taught",
    "ConstantTrace": "AtArrival",
    "EstimatingRest": "Resting",
    "FirstDroppingToken": "Dropping",
    "LatentFactors": "Factors",
    "LearningFromQueries": "Asking",
    "Observed": "Seen",
    "SelectionTrace": "Judging",
    "after_layers": "behind_layers",
    "bind": "taught",
    "first_free": "behind",
    "largest_rotation": "most_behind",
    "min_distance": "behind",
    "settled": "behind",
    "without_arrays": "untaught",
}


def source_of(method: Method) -> str:
    """Compute a digest of the code of a method: its functions and the classes of its words, with their bases.

    Comments, docstrings, layout, decorators of functions and descriptions of words (`SAID`) are left out,
    because they change no result. Code that methods share, such as attention or the default phase, is not in
    the digest either; a line's revision says which version of it ran.
    """
    parts = {_text(one) for one in _defined(method)}
    return hashlib.sha256("".join(sorted(parts)).encode()).hexdigest()[:12]


@functools.cache  # reading a class from its file takes longer than all else here
def _text(defined: Any) -> str:
    """Write the code of a function or class in its former names, without docstrings, comments and `SAID`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(defined)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            said = node.body[:1] if ast.get_docstring(node) is not None else []
            said += [part for part in node.body if _name(part) in SAID]
            node.body = [part for part in node.body if part not in said]
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            node.body = [part for part in node.body if not _asks_what_is_said(part)]
        for field in ("arg", "attr", "id", "name"):
            if (name := getattr(node, field, None)) in FORMER:
                setattr(node, field, FORMER[name])
    return ast.dump(tree)


def _asks_what_is_said(part: ast.stmt) -> bool:
    """Return whether a statement is `if self.x:` of a name that only describes."""
    return isinstance(part, ast.If) and isinstance(part.test, ast.Attribute) and part.test.attr in SAID


def _name(part: ast.stmt) -> str | None:
    """Return the name that a line of a class defines."""
    target = part.targets[0] if isinstance(part, ast.Assign) else getattr(part, "target", part)
    return getattr(target, "id", getattr(target, "name", None))


def _defined(word: Any) -> Iterator[Any]:
    """Yield the functions that a method names and the classes of kvjax that it consists of."""
    if isinstance(word, tuple | frozenset):
        for part in word:
            yield from _defined(part)
    elif isinstance(word, str) and word in METHODS:
        yield inspect.unwrap(METHODS[word])
    elif dataclasses.is_dataclass(word) and not isinstance(word, type):
        if not isinstance(word, Method):
            classes = (c for c in type(word).__mro__ if c.__module__.startswith("kvjax."))
            yield from (c for c in classes if not c.__module__.endswith("facts"))
        for field in dataclasses.fields(word):
            value = getattr(word, field.name)
            if value != field.default:
                yield from _defined(value)
