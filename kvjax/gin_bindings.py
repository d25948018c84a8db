"""The only file that speaks gin: it turns *.gin files into plain arguments for the library.

Values are read before anything is traced; nothing called under jit is gin-configurable.
"""

from __future__ import annotations

import ast
import difflib
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any

import gin

from kvjax.errors import InputError
from kvjax.methods import check_hyper, resolve


@gin.configurable
def hyper(**methods: Any) -> dict[str, Any]:
    """What a preset binds to each name of a method, as it is written there."""
    return methods


def _section(**bound: Any) -> dict[str, Any]:
    """What a file of `kvjax train` binds in one section."""
    return bound


_SECTIONS = {
    name: gin.external_configurable(_section, name=name, module="kvjax")
    for name in ("model", "data", "optimiser", "train", "tune", "devices")
}


def presets() -> dict[str, Path]:
    """The shipped presets of `compare`, by name."""
    return _shipped("compare")


def _folders() -> dict[str, Path]:
    import kvjax.configs

    where = Path(next(iter(kvjax.configs.__path__)))
    return {name: where / name for name in ("compare", "train")}


def _shipped(folder: str) -> dict[str, Path]:
    return {p.stem: p for p in sorted(_folders()[folder].glob("*.gin"))}


def load_preset(name: str) -> dict[str, dict[str, Any]]:
    """Hyper-parameters per method id, from a shipped preset's name or the path of a .gin file.

    Raises InputError, with the file and the line where they are known, for what gin cannot read, an unknown
    method or hyper-parameter (with the nearest name), a value outside its range, and two names of one method.

    >>> load_preset("short")["snapkv"]["window"]
    16
    """
    known = presets()
    path = known.get(name, Path(name))
    if not path.is_file():
        raise InputError(f"no preset {name!r}: give one of {', '.join(known)}, or the path of a .gin file")
    found: dict[str, dict[str, Any]] = {}
    names: dict[str, str] = {}
    for key, given in _bound(path, {"hyper": hyper}, _FORM)["hyper"].items():
        id, values = _checked(path, key, given)
        if id in names:
            raise InputError(
                f"{_place(path, key)}: hyper.{names[id]} and hyper.{key} are one method, {id}, expected one "
                "of them: remove the other, also from what is included"
            )
        names[id], found[id] = key, values
    return found


def load_training(path: str | Path, changes: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """What a file of `kvjax train` binds, by section, and what `changes` ("train.steps=10") bind instead.

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
    return _bound(file, _SECTIONS, form, [_binding(x) for x in changes])


def training_files() -> dict[str, Path]:
    """The shipped files of `kvjax train`, by name."""
    return _shipped("train")


def _binding(change: str) -> str:
    """ "a.b=c" as gin reads it; what is no Python value is a string."""
    name, equals, value = change.partition("=")
    if not equals or "." not in name:
        raise InputError(f"{change!r} binds nothing: write SECTION.NAME=VALUE, such as train.steps=100")
    if (section := name.partition(".")[0].strip()) not in _SECTIONS:
        raise InputError(_unknown(section, _SECTIONS))
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError):
        value = repr(value)
    return f"{name.strip()} = {value}"


def _unknown(section: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(section, known, 1)
    return f"unknown section {section!r}: " + (
        f"did you mean {near[0]}?" if near else f"expected {', '.join(known)}"
    )


def _bound(
    path: Path, sections: Mapping[str, Callable[[], Any]], form: str, changes: Sequence[str] = ()
) -> dict[str, Any]:
    """What the file and those that it includes bind, by section; InputError where gin cannot read it."""
    gin.clear_config()
    # gin logs what it also raises.
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        # What a file includes stands beside it, where its path says from the current folder, or is shipped.
        for folder in (path.parent, *_folders().values()):
            gin.add_config_file_search_path(str(folder))
        gin.parse_config_file(str(path))
        gin.parse_config(list(changes))
        return {name: section() for name, section in sections.items()}
    except TokenError as error:
        message, (line, _) = error.args
        raise InputError(f"{path}, line {line}: {message}: is a bracket or a quote left open?") from error
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise InputError(f"{error.filename or path}{line}: {_plainly(error.msg)}: {form}") from error
    except (ValueError, OSError, ImportError, UnicodeDecodeError) as error:
        where = re.search(r'In file "(.*?)", line (\d+)', str(error))
        place = f"{where[1]}, line {where[2]}" if where else str(path)
        foreign = re.match(r"No configurable matching '(.*?)'", str(error))
        what = _unknown(foreign[1], sections) if foreign else f"{_plainly(str(error))}: {form}"
        raise InputError(f"{place}: {what}") from error
    except TypeError as error:
        unbound = re.search(r"'macro' .* in scope '(.*?)'", str(error))
        if unbound is None:
            raise
        macros = re.findall(r"^(\w+) = ", gin.config_str(), re.MULTILINE)
        raise InputError(f"{path}: {_no_macro(unbound[1], macros)}") from error
    finally:
        logging.disable(before)
        gin.clear_config()


def _no_macro(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean %{near[0]}?" if near else f"write {name} = VALUE in it"
    return f"it uses the macro %{name}, which nothing binds: {hint}"


_FORM = "write hyper.METHOD = {'NAME': VALUE}, with plain values, or include 'FILE.gin'"


def _plainly(message: str | None) -> str:
    """The first line of a message of gin, without addresses in memory and its own full stop."""
    first = (message or "cannot be read").splitlines()[0]
    return re.sub(r"<ast\.(\w+) object at 0x\w+>", "a name", first).removesuffix(".")


def _checked(path: Path, key: str, given: Any) -> tuple[str, dict[str, Any]]:
    """(id, hyper-parameters) of one binding."""
    place = _place(path, key)
    if not isinstance(given, dict):
        raise InputError(f"{place}: hyper.{key} is {given!r}, expected a dict such as {{'window': 16}}")
    try:
        id = resolve(key)
        return id, check_hyper(id, given)
    except ValueError as error:
        raise InputError(f"{place}: {error}") from error


def _place(path: Path, key: str) -> str:
    """The file, and the line that binds a name; the line is missing where an included file binds it."""
    lines = path.read_text().splitlines()
    found = [i for i, line in enumerate(lines, 1) if re.match(rf"\s*hyper\.{key}\b", line)]
    return f"{path}, line {found[-1]}" if found else str(path)
