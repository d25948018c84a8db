"""Validation: what a method requires of its words, checked with one sentence when the `Keep` is built."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.base.kind import Kind, expected, undefined, unstated
from kvjax.grammar.fitted import FittedWord
from kvjax.grammar.kinds import Allocation, Merge, Observation, Pattern, Preferring, Score, Trace
from kvjax.grammar.model_kinds import Make, Residence, Stacking
from kvjax.grammar.phase import Phase
from kvjax.grammar.prompt_edits import Narrow, Rereading
from kvjax.grammar.prompt_reads import PromptRead
from kvjax.grammar.read_kinds import Read
from kvjax.grammar.when import When
from kvjax.state.codes import Codec


def check_words(score: Any, allocate: Any, protect: Any, merge: Any) -> None:
    """Raise ValueError for a word that is misplaced, not a frozen dataclass or lacks an attribute.

    >>> check_words(None, None, 3, None)
    Traceback (most recent call last):
    ValueError: protect must be a tuple of patterns, got 3: write protect=(3,)
    """
    if not isinstance(protect, tuple):
        more = protect if isinstance(protect, list) else [protect]
        right = f"({', '.join(map(repr, more))},)"
        raise ValueError(f"protect must be a tuple of patterns, got {protect!r}: write protect={right}")
    if score is not None:
        _check(score, "score", Score, "Word")
        _check_needs(score)
        for trace in _frozenset(score, "traces", "frozenset({AccumulatedMass(Mass())})"):
            _check(trace, "trace", Trace)
            _check_needs(trace)
    if allocate is not None:
        _check(allocate, "allocation", Allocation)
        _check_needs(allocate)
        if allocate.needs and not isinstance(allocate, Preferring):
            raise ValueError(
                f"{type(allocate).__name__} has `needs` and no `preference`: subclass "
                "kvjax.grammar.kinds.Preferring, or leave them out"
            )
    for pattern in protect:
        _check(pattern, "pattern", Pattern)
    if merge is not None:
        _check(merge, "merge", Merge)
        _check_needs(merge)


def check_phase(phase: Any) -> None:
    """Raise ValueError if `phase` does not say how keys are rotated, or is not a frozen dataclass."""
    _check(phase, "phase", Phase)


def check_when(when: Any) -> None:
    """Raise ValueError if `when` does not say when slots are evicted, or is not a frozen dataclass."""
    _check(when, "when", When)


def check_narrow(narrow: Any) -> None:
    """Raise ValueError if `narrow` does not narrow prompts or is not a frozen dataclass; None is allowed."""
    if narrow is not None:
        _check(narrow, "narrowing", Narrow)


# By field of a method, its keep and store aside: what messages call the word, and the base class of the word.
_OF_METHODS: dict[str, tuple[str, type[Kind]]] = {
    "reread": ("reading", Rereading),
    "make": ("make", Make),
    "stack": ("stack word", Stacking),
    "host": ("host word", Residence),
    "read": ("read", Read),
    "read_prompt": ("read of prompts", PromptRead),
}


def check_parts(method: Any) -> None:
    """Raise ValueError for a part of a method that is no word of its kind; None is allowed."""
    for name, (called, kind) in _OF_METHODS.items():
        if (word := getattr(method, name)) is not None:
            _check(word, called, kind)


def check_codecs(*codecs: Any) -> None:
    """Raise ValueError for a codec that is not a frozen dataclass or lacks an attribute; None is allowed.

    A codec's fields may be codecs, which are checked, too.
    """
    for codec in codecs:
        if codec is not None:
            hint = ", and a wrapper stands before one, as in Rotate() >> Affine(4)"
            _check(codec, "codec", Codec, hint=hint)
            parts = (getattr(codec, field.name) for field in dataclasses.fields(codec))
            check_codecs(*(part for part in parts if isinstance(part, Codec)))


def _check(word: Any, called: str, kind: type[Kind], base: str = "", hint: str = "") -> None:
    """Raise ValueError unless a word is of a kind, frozen, and defines what its kind expects.

    base: the name in `kvjax.words` of what to subclass, if that is not the kind itself.
    """
    name, base = type(word).__name__, f"kvjax.words.{base or kind.__name__}"
    _check_no_class(word, called)
    if not isinstance(word, kind):
        raise ValueError(
            f"{name} is no {called}: every {called} is a frozen dataclass that subclasses {base}{hint}"
        )
    _check_frozen(word)
    _check_shares(word)
    _check_fitted(word)
    if lacks := undefined(type(word)):
        raise ValueError(f"{name} is a {called} without `{lacks[0]}`: define it as {base} says")
    if old := next((name for name in kind.former if hasattr(type(word), name)), None):
        raise ValueError(f"{name} defines `{old}`, which nothing calls: rename it `{kind.former[old]}`")
    if able := unstated(type(word), kind):
        raise ValueError(
            f"{name} defines {' and '.join(f'`{name}`' for name in expected(able))} and is no "
            f"{able.__name__}: subclass {able.__module__}.{able.__name__}, or give them other names"
        )


def _check_no_class(word: Any, called: str) -> None:
    if isinstance(word, type):
        raise ValueError(
            f"the {called} is the class {word.__name__}, not one of its words: write {_call(word)}"
        )


def _check_frozen(word: Any) -> None:
    name, params = type(word).__name__, getattr(type(word), "__dataclass_params__", None)
    if not (params is not None and params.frozen) and not isinstance(word, tuple):
        raise ValueError(
            f"{name} is no frozen dataclass, so that equal sentences would not be equal: "
            "write @dataclasses.dataclass(frozen=True) above the class"
        )
    try:
        hash(word)
    except TypeError as error:
        raise ValueError(
            f"{word!r} cannot be hashed ({error}): its fields must be numbers, texts, tuples or other words"
        ) from None


def _check_fitted(word: Any) -> None:
    fields = dataclasses.fields(word) if dataclasses.is_dataclass(word) else ()
    if not isinstance(word, FittedWord) and any(field.name == "fitted" for field in fields):
        raise ValueError(
            f"{type(word).__name__} has a field `fitted` and is no FittedWord, so its arrays would reach no "
            "program: subclass kvjax.words.FittedWord, too, or give the field another name"
        )


def _check_shares(word: Any) -> None:
    """Raise ValueError for a share that equals the word with a number in its place, as 1.0 equals 1.

    Programs are compiled once for equal words, so one of both would run the program of the other.
    """
    fields = dataclasses.fields(word) if type(word).__module__.startswith("kvjax.") else ()
    for field in fields:
        value = getattr(word, field.name)
        if not (isinstance(value, float) and value >= 1 and value.is_integer()):
            continue
        number = int(value)
        if {"int", "float"} <= {*str(field.type).split(" | ")} and _equals(word, field.name, number):
            raise ValueError(
                f"{field.name} of {type(word).__name__} must be a number (int) or a share below 1 (float), "
                f"got {value!r}: write {number} for a number"
            )


def _equals(word: Any, name: str, value: Any) -> bool:
    """Return whether a word equals the one with another value of a field; False if there is no such word."""
    try:
        return bool(dataclasses.replace(word, **{name: value}) == word)
    except ValueError:
        return False


def _check_needs(word: Any) -> None:
    for observation in _frozenset(word, "needs", "frozenset({Queries(1)})"):
        _check(observation, "observation", Observation)


def _frozenset(word: Any, name: str, example: str) -> frozenset[Any]:
    """Read the property `name` of a word, which must be a frozenset."""
    found = getattr(word, name)
    if not isinstance(found, frozenset):
        raise ValueError(
            f"`{name}` of {type(word).__name__} must be a frozenset, got {type(found).__name__}: "
            f"write it as a @property that returns {example}, for example"
        )
    return found


def _call(word: type) -> str:
    fields = dataclasses.fields(word) if dataclasses.is_dataclass(word) else ()
    missing, none = dataclasses.MISSING, lambda f: f.default is missing and f.default_factory is missing
    return f"{word.__name__}({', '.join(f'{f.name}=...' for f in fields if none(f))})"
