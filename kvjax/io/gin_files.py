"""Reads *.gin files in isolation: literals, macros, includes and bindings of known sections, nothing else.

Only gin's parser is used: a file imports and calls nothing, and the program's own gin bindings are unchanged.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple

from gin import config_parser

from kvjax.base.errors import InputError

# Limits far above any real file; without them, a crafted one could take all memory or time.
_BYTES, _FILES, _VALUES = 1_000_000, 64, 100_000
# A lock, because Python 3.11's `ast`, which gin's parser calls, counts its depth over all threads.
_PARSING = threading.Lock()


class Binding(NamedTuple):
    """A value, and where it is bound, as messages name it ("mine.gin, line 3")."""

    value: Any
    place: str


@dataclasses.dataclass(frozen=True)
class _Macro:
    name: str


@dataclasses.dataclass(frozen=True)
class _Reference:
    name: str


class _Values(config_parser.ParserDelegate):
    def macro(self, macro_name: str) -> _Macro:
        return _Macro(macro_name)

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Any:
        return _Reference(f"@{scoped_configurable_name}{'()' if evaluate else ''}")


def read_bindings(
    path: Path, sections: Iterable[str], form: str, folders: Sequence[Path] = ()
) -> dict[str, dict[str, Binding]]:
    """Read the bindings of a file and its includes, by section and name; later ones win.

    An included file is looked up beside the one that includes it, in the current folder and in `folders`; it
    must lie in one of these or in the folder of `path`. form: the allowed form, for messages.

    Raises InputError, with file and line, for anything else in the file.
    """
    reader = _Reader([path.parent, Path.cwd(), *folders], form)
    found: dict[str, dict[str, Binding]] = {name: {} for name in sections}
    macros: dict[str, Binding] = {}
    for statement, place in reader.statements(path):
        scope, name, arg = statement.scope, statement.selector.removeprefix("kvjax."), statement.arg_name
        bound = Binding(statement.value, place)
        if not arg:
            macros["/".join(filter(None, (scope, name)))] = bound
        elif name not in found:
            raise InputError(f"{place}: {unknown_section(name.partition('.')[0], found)}")
        elif scope:
            raise InputError(f"{place}: {scope}/{name}.{arg} binds in a scope, which nothing reads: {form}")
        else:
            found[name][arg] = bound
    whole = _Macros(macros)
    return {
        section: {n: Binding(whole.replaced(x.value, x.place), x.place) for n, x in bound.items()}
        for section, bound in found.items()
    }


def unknown_section(section: str, known: Iterable[str]) -> str:
    """Write the message for an unknown section, with the nearest known one."""
    near = difflib.get_close_matches(section, list(known), 1)
    return f"unknown section {section!r}: " + (
        f"did you mean {near[0]}?" if near else f"expected {', '.join(known)}"
    )


class _Reader:
    """The statements of a file and of what it includes, in order."""

    def __init__(self, folders: Sequence[Path], form: str):
        self.folders = [folder.resolve() for folder in folders]
        self.form = form
        self.read = 0

    def statements(
        self, path: Path, within: tuple[Path, ...] = ()
    ) -> Iterator[tuple[config_parser.BindingStatement, str]]:
        self.read += 1
        if self.read > _FILES:
            raise InputError(f"{within[0]} includes more than {_FILES} files: include fewer")
        for one in _parsed(path, self.form):
            place = f"{path}, line {one.location.line_num}"
            if isinstance(one, config_parser.IncludeStatement):
                file = self._included(one.filename, path, place)
                if file.resolve() in (*within, path.resolve()):
                    raise InputError(f"{place}: {one.filename} includes itself: remove the include")
                yield from self.statements(file, (*within, path.resolve()))
            elif isinstance(one, config_parser.ImportStatement):
                raise InputError(f"{place}: {one.format()!r} would run Python code: {self.form}")
            elif isinstance(one, config_parser.BindingStatement):
                if (found := next(_references(one.value), None)) is not None:
                    raise InputError(f"{place}: {found} would run Python code: {self.form}")
                yield one, place

    def _included(self, name: str, by: Path, place: str) -> Path:
        """Find the file that an include names. InputError if it is missing or outside the allowed folders."""
        outside = False
        for folder in (by.parent, *self.folders):
            try:
                file = folder / name
                if not file.is_file():
                    continue
                real = file.resolve()
            except (OSError, ValueError):
                continue
            if any(real.is_relative_to(allowed) for allowed in (*self.folders, by.parent.resolve())):
                return file
            outside = True
        if outside:
            raise InputError(
                f"{place}: {name} lies outside the folders that a file may include from: put it beside the "
                "file, or run kvjax in a folder above both"
            )
        raise InputError(f"{place}: no file {name} to include: put it beside the file; {self.form}")


def _parsed(path: Path, form: str) -> Iterator[Any]:
    """Yield the statements of one file, by gin's parser."""
    try:
        if path.stat().st_size > _BYTES:
            raise InputError(f"{path} is larger than {_BYTES} bytes, expected a few lines: {form}")
        text = path.read_text(encoding="utf-8-sig")
        with _PARSING:
            statements = list(config_parser.ConfigParser(io.StringIO(text), _Values()))
        yield from statements
    except TokenError as error:
        message, (line, _) = error.args
        raise InputError(f"{path}, line {line}: {message}: is a bracket or a quote left open?") from error
    except SyntaxError as error:
        # Python's tokenizer knows the line; gin's parser replaces it by a location.
        known = error.args[1] if len(error.args) > 1 else None
        line = known[1] if isinstance(known, tuple) and len(known) > 1 else error.lineno
        where = f"{path}, line {line}" if line else str(path)
        raise InputError(f"{where}: {_plainly(error.msg)}: {form}") from error
    except (RecursionError, MemoryError) as error:
        raise InputError(f"{path}: its brackets are nested too deeply: {form}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from error
    except InputError:
        raise
    except (ValueError, TypeError) as error:  # bytes that are not text, keys that are not keys
        raise InputError(f"{path}: {_plainly(str(error))}: {form}") from error


def _references(value: Any) -> Iterator[str]:
    """Yield the names of functions that a value refers to."""
    if isinstance(value, _Reference):
        yield value.name
    elif isinstance(value, dict):
        for part in (*value.keys(), *value.values()):
            yield from _references(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _references(part)


class _Macros:
    """Replaces macros by their values."""

    def __init__(self, bound: dict[str, Binding]):
        self.bound = bound
        self.count = 0

    def replaced(self, value: Any, place: str, within: tuple[str, ...] = ()) -> Any:
        self.count += 1
        if self.count > _VALUES:
            raise InputError(f"{place}: its macros stand for more than {_VALUES} values: bind fewer")
        if isinstance(value, _Macro):
            if value.name not in self.bound:
                raise InputError(f"{place.partition(', line')[0]}: {self._missing(value.name)}")
            if value.name in within:
                raise InputError(f"{place}: the macro %{value.name} stands for itself: bind a value to it")
            return self.replaced(self.bound[value.name].value, place, (*within, value.name))
        if isinstance(value, dict):
            pairs = [
                (self.replaced(k, place, within), self.replaced(x, place, within)) for k, x in value.items()
            ]
            try:
                return dict(pairs)
            except TypeError as error:
                raise InputError(f"{place}: a list or dict is no key of a dict: write a text") from error
        if isinstance(value, list | tuple):
            return type(value)(self.replaced(x, place, within) for x in value)
        return value

    def _missing(self, name: str) -> str:
        near = difflib.get_close_matches(name, self.bound, 1)
        hint = f"did you mean %{near[0]}?" if near else f"write {name} = VALUE in it"
        return f"it uses the macro %{name}, which nothing binds: {hint}"


def _plainly(message: str | None) -> str:
    """Return the first line of a message, without memory addresses and without its full stop."""
    first = (message or "cannot be read").splitlines()[0]
    return re.sub(r"<ast\.(\w+) object at 0x\w+>", "a name", first).removesuffix(".")
