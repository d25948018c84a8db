"""Reads *.gin files: hyper-parameters of methods, and the settings of comparisons and training runs.

Values are read before anything is traced; functions under jit are never configured by a file.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.base.errors import InputError
from kvjax.io.gin_files import Binding, read_bindings, unknown_section
from kvjax.methods import check_hyper, resolve
from kvjax.methods.parse import single
from kvjax.methods.user import only_given

_SECTIONS = ("model", "data", "optimiser", "train", "tune", "devices")
_FORM = "write hyper.METHOD = {'NAME': VALUE}, with plain values, or include 'FILE.gin'"


def presets() -> dict[str, Path]:
    """List the shipped presets of `compare`, by name."""
    return _shipped("compare")


def _folders() -> dict[str, Path]:
    import kvjax.configs

    where = Path(next(iter(kvjax.configs.__path__)))
    return {name: where / name for name in ("compare", "eval", "train")}


def _shipped(folder: str) -> dict[str, Path]:
    return {p.stem: p for p in sorted(_folders()[folder].glob("*.gin"))}


def load_preset(name: str) -> dict[str, dict[str, Any]]:
    """Hyper-parameters per method id, from a shipped preset's name or the path of a .gin file.

    Raises InputError, with file and line if known, for anything but bindings of plain values
    (`kvjax.io.gin_files`), an unknown method or hyper-parameter (with the nearest name), a value outside its
    range, and two names of one method.

    >>> load_preset("short")["snapkv"]["window"]
    16
    """
    known = presets()
    path = known.get(name, Path(name))
    if not path.is_file():
        raise InputError(f"no preset {name!r}: give one of {', '.join(known)}, or the path of a .gin file")
    found: dict[str, dict[str, Any]] = {}
    names: dict[str, str] = {}
    for key, bound in read_bindings(path, ["hyper"], _FORM, [*_folders().values()])["hyper"].items():
        with only_given(()):
            id, values = _checked(key, bound)
        if id in names:
            raise InputError(
                f"{bound.place}: hyper.{names[id]} and hyper.{key} are one method, {id}, expected one "
                "of them: remove the other, also from what is included"
            )
        names[id], found[id] = key, values
    return found


def load_training(path: str | Path, changes: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Read the bindings of a file of `kvjax train`, by section, overridden by `changes` ("train.steps=10").

    A shipped file (`configs/train`) may be given by its name, and any other may include it. Raises InputError
    as `load_preset` does.

    >>> load_training("bytes", ["train.steps=10"])["train"]["steps"]
    10
    """
    known = training_files()
    file = known.get(str(path), Path(path))
    if not file.is_file():
        near = difflib.get_close_matches(str(path), known, 1)
        hint = f"did you mean {near[0]}?" if near else f"give one of {', '.join(known)}, or a file's path"
        raise InputError(f"no training file {str(path)!r}: {hint}")
    form = "write SECTION.NAME = VALUE, with plain values"
    read = read_bindings(file, _SECTIONS, form, [*_folders().values()])
    if (method := read["train"].get("method")) is not None and ".py" in str(method.value):
        raise InputError(
            f"{method.place}: train.method is {method.value!r}, which would run Python code, expected a "
            "method's name: give a file of your own on the command line, --set train.method=FILE.py:NAME"
        )
    found = {section: {name: bound.value for name, bound in of.items()} for section, of in read.items()}
    for section, name, value in map(_change, changes):
        found[section][name] = value
    return found


def load_comparison(path: str | Path, allowed: Sequence[str]) -> dict[str, Any]:
    """Read the `allowed` arguments of `kvjax.compare` that a file binds as `compare.NAME = VALUE`.

    A shipped file (`configs/eval`) may be given by its name. Raises InputError as `load_preset` does, and for
    methods and tasks of Python files.

    >>> load_comparison("pilot", ["model", "tasks", "length", "methods", "budgets", "protocols", "samples",
    ...                           "baselines", "gold"])["length"]
    1024
    """
    known = _shipped("eval")
    file = known.get(str(path), Path(path))
    if not file.is_file():
        near = difflib.get_close_matches(str(path), known, 1)
        hint = f"did you mean {near[0]}?" if near else f"give one of {', '.join(known)}, or a file's path"
        raise InputError(f"no file of a comparison {str(path)!r}: {hint}")
    form = "write compare.NAME = VALUE, with plain values"
    found = read_bindings(file, ["compare"], form, [*_folders().values()])["compare"]
    for name, bound in found.items():
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(allowed)}"
            raise InputError(f"{bound.place}: compare.{name} is no argument of a comparison: {hint}")
        if name in ("methods", "tasks") and any(".py" in str(one) for one in bound.value or ()):
            raise InputError(
                f"{bound.place}: compare.{name} is {bound.value!r}, which would run Python code, expected "
                "names: call kvjax.compare with a file of your own"
            )
    return {name: bound.value for name, bound in found.items()}


def training_files() -> dict[str, Path]:
    """List the shipped files of `kvjax train`, by name."""
    return _shipped("train")


def _change(change: str) -> tuple[str, str, Any]:
    """Section, name and value of "a.b=c"; a value that is not a Python literal is a string."""
    where, equals, value = change.partition("=")
    section, dot, name = where.strip().partition(".")
    if not (equals and dot and name.isidentifier()):
        raise InputError(f"{change!r} binds nothing: write SECTION.NAME=VALUE, such as train.steps=100")
    if section not in _SECTIONS:
        raise InputError(unknown_section(section, _SECTIONS))
    try:
        return section, name, ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return section, name, value


def _checked(key: str, bound: Binding) -> tuple[str, dict[str, Any]]:
    """Return (id, hyper-parameters) of one binding."""
    given, place = bound
    try:
        id = resolve(key)
        if isinstance(given, str) and (named := single(given)).name == id:
            given = dict(named.hyper)
        if not isinstance(given, dict):
            raise InputError(
                f"hyper.{key} is {given!r}, expected its hyper-parameters: write {{'window': 16}}, or "
                f"'{id}(window=16)'"
            )
        return id, check_hyper(id, given)
    except ValueError as error:
        raise InputError(f"{place}: {error}") from error
