"""Methods as text, the way the command line and saved files name them.

snapkv                          an id or alias
snapkv:window=16,variant=kvpress     with hyper-parameters
snapkv(window=16, variant=kvpress)   the same, as Python writes them
ape:contexts=(512, 256)         several values in brackets
snapkv+kivi:bits=2              a chain
my_file.py:my_method:alpha=3    a function in a file of one's own
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.errors import InputError
from kvjax.grammar import Budget, Method, chain
from kvjax.methods import method, resolve, takes_budget
from kvjax.methods.user import from_file, load_function

Hyper = tuple[tuple[str, Any], ...]
_CONSTANTS = {"true": True, "false": False, "none": None}
# The + between methods has a name behind it, the one in 1e+3 a digit.
_JOIN = re.compile(r"\s*\+\s*(?=[A-Za-z_./~])")
_CALL = re.compile(r"(?P<name>[^()=]+)\((?P<hyper>([^()]|\([^()]*\))*)\)")
_VALUES = re.compile(r"(?<==)\s*\(([^()]*)\)")
_BETWEEN = re.compile(r",(?![^()]*\))")
_FILE = re.compile(r"(?P<name>.+\.py:[^:]*)(:(?P<hyper>.*))?", re.DOTALL)


class _Part(NamedTuple):
    """One method of a chain: its id, or path/to/file.py:function, and its hyper-parameters."""

    name: str
    hyper: Hyper

    @property
    def takes_budget(self) -> bool:
        if "budget" in dict(self.hyper):
            return False
        if ".py:" in self.name:
            return "budget" in inspect.signature(load_function(self.name)).parameters
        return takes_budget(self.name)

    def build(self, budget: float | int | None) -> Method:
        hyper = dict(self.hyper) | ({"budget": budget} if self.takes_budget and budget is not None else {})
        try:
            return from_file(self.name, **hyper) if ".py:" in self.name else method(self.name, **hyper)
        except InputError:
            raise
        except ValueError as error:
            raise InputError(str(error)) from error


@dataclasses.dataclass(frozen=True)
class Builder:
    """A parsed text: called with a budget (None where it takes none), it builds the method.

    The budget goes to every part that takes one and has none written in the text.
    """

    label: str
    parts: tuple[_Part, ...]

    @property
    def takes_budget(self) -> bool:
        return any(part.takes_budget for part in self.parts)

    def __call__(self, budget: float | int | None = None) -> Method:
        if budget is not None and not self.takes_budget:
            fixed = any("budget" in dict(part.hyper) for part in self.parts)
            why = "has its budget in its name" if fixed else "takes no budget"
            raise InputError(f"method {self.label} {why}, got budget {budget}: leave the budget out")
        try:
            built = [part.build(budget) for part in self.parts]
            return built[0] if len(built) == 1 else chain(*built)
        except InputError:
            raise
        except ValueError as error:
            raise InputError(str(error)) from error


def parse_method(text: str, defaults: Mapping[str, Mapping[str, Any]] | None = None) -> tuple[str, Builder]:
    """(label, builder) of a method's text; the label is the text in normal form, which parses to the same.

    defaults: hyper-parameters per method id for what the text leaves out, as presets bind them.

    Raises InputError for whatever the builder would refuse at any budget: unknown methods and
    hyper-parameters (with the nearest name), wrong values, parts that cannot be chained, missing files.

    >>> label, build = parse_method("snapkv+kivi:bits=4", {"snapkv": {"window": 8}})
    >>> label, build.takes_budget
    ('snapkv + kivi:bits=4', True)
    >>> build(0.25).spec[1][1]
    ('snapkv', (('budget', 0.25), ('window', 8)))
    """
    given = [_part(piece.strip(), text) for piece in _JOIN.split(text.strip())]
    label = " + ".join(_label(part) for part in given)
    parts = tuple(
        part._replace(hyper=_sorted({**(defaults or {}).get(part.name, {}), **dict(part.hyper)}))
        for part in given
    )
    builder = Builder(label, parts)
    builder(1.0 if builder.takes_budget else None)
    return label, builder


def with_file(text: str, path: str | Path) -> str:
    """A method's text with the file of its fitted arrays.

    >>> with_file("gisting(tokens=16)", "mine.safetensors")
    'gisting:fitted=mine.safetensors,tokens=16'
    """
    part = _part(text.strip(), text)
    return _label(part._replace(hyper=_sorted({**dict(part.hyper), "fitted": path})))


def parse_budget(text: str) -> float | int:
    """A budget as written: "0.25" is a share of the tokens, "64" a number of slots per head.

    Raises InputError for anything else.

    >>> parse_budget("0.25"), parse_budget("64")
    (0.25, 64)
    """
    value = _value(text)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(
            f"budget {text!r} is not a number, expected a fraction in (0, 1] such as 0.25 or a number of "
            "slots such as 256" + (": put spaces between several" if "," in text else "")
        )
    try:
        Budget(value)
    except ValueError as error:
        hint = (
            "" if "did you mean" in str(error) else ": write a fraction such as 0.25 or a number such as 256"
        )
        raise InputError(f"{error}{hint}") from error
    return value


def read_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Options as the command line writes them; InputError for what is no NAME=VALUE, or given twice.

    >>> read_options(["rate=0.01", "recent=32"])
    {'rate': 0.01, 'recent': 32}
    """
    return dict(_hyper(",".join(pairs), " ".join(pairs)))


def from_spec(spec: tuple[Any, ...], own: Callable[..., Method] = from_file) -> Method:
    """The method whose `spec` this is: one of the library, one of a user's file, or a chain of such.

    own: builds those of a file from "file.py:function" and hyper-parameters, in place of that file.

    Raises InputError where it cannot be built again.

    >>> from_spec(("snapkv", (("budget", 0.25), ("window", 16)))).id
    'snapkv'
    """
    match spec:
        case (str(), ("chain", *parts)):
            return chain(*(from_spec(part, own) for part in parts))
        case (str() as name, tuple() as hyper) if all(isinstance(pair, tuple) for pair in hyper):
            return own(name, **dict(hyper)) if ".py:" in name else _Part(name, hyper).build(None)
    raise InputError(
        f"the method {spec[0]!r} was not built by a name: build it with kvjax.method, kvjax.chain of such "
        "methods, or kvjax.methods.user.from_file"
    )


# --- reading -----------------------------------------------------------------------------------------


def _part(piece: str, text: str) -> _Part:
    if not piece:
        raise InputError(f"method {text!r} is empty, expected an id such as snapkv: see `kvjax methods`")
    if (call := _CALL.fullmatch(piece)) is not None:
        piece = f"{call['name'].strip()}:{call['hyper'].strip().removesuffix(',')}"
    if re.search(r"[()]", _VALUES.sub("", piece).rpartition("/")[2]):
        raise InputError(
            f"{piece!r} has a bracket too few or too many, expected one pair: write id(key=value)"
        )
    if piece.endswith(".py"):
        raise InputError(f"{piece!r} names a file but no function, expected {piece}:my_method")
    file = _FILE.fullmatch(piece)
    name, _, hyper = (file["name"], "", file["hyper"] or "") if file else piece.partition(":")
    try:
        name = name if file else resolve(name.strip())
    except ValueError as error:
        raise InputError(f"{error}; see `kvjax methods`") from error
    return _Part(name, _hyper(hyper, piece))


def _hyper(text: str, piece: str) -> Hyper:
    found: dict[str, Any] = {}
    for pair in filter(None, (p.strip() for p in _BETWEEN.split(text))):
        key, equals, value = (x.strip() for x in pair.partition("="))
        if not (key.isidentifier() and equals and value):
            raise InputError(
                f"{pair!r} in {piece!r} is no hyper-parameter, expected key=value: write it like window=16"
            )
        if key in found:
            raise InputError(f"{key!r} is given twice in {piece!r}, expected once: remove one")
        found[key] = _value(value)
    return _sorted(found)


def _sorted(hyper: Mapping[str, Any]) -> Hyper:
    return tuple(sorted(hyper.items()))


def _value(text: str) -> Any:
    """The number, constant (true, false, none) or word of a text; in brackets, several of them."""
    if text.startswith("(") and text.endswith(")"):
        return tuple(_value(part.strip()) for part in text[1:-1].split(",") if part.strip())
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip("'\"")


def _label(part: _Part) -> str:
    return part.name + (":" + ",".join(f"{k}={v}" for k, v in part.hyper) if part.hyper else "")
