"""Methods from a user's own file, named `path/to/file.py:function` wherever a method is accepted."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from kvjax.base.errors import InputError
from kvjax.grammar import Method, check
from kvjax.grammar.to_text import parts_of
from kvjax.methods.declared import check_declared
from kvjax.methods.parameters import checked

# A user's function that builds a method, or the path of a Python file that has it.
Own = str | os.PathLike[str] | Callable[..., Any]
_GIVEN: ContextVar[frozenset[str] | None] = ContextVar("_GIVEN", default=None)


def from_file(name: str, /, **hyper: Any) -> Method:
    """Build the method that a function in a Python file makes: `from_file("mine.py:my_method", budget=0.25)`.

    The function takes hyper-parameters (including `budget`, if it has one) and returns a Method; its spec
    becomes (name, sorted hyper-parameters), with `name` as it was given.

    Raises InputError if there is no such file or function, the file fails to import, a hyper-parameter is
    unknown or missing, or the function does not return a Method.

    >>> import pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "mine.py"
    >>> lines = ["from kvjax.methods import snapkv", "def short(budget): return snapkv(budget, window=8)"]
    >>> _ = file.write_text(chr(10).join(lines))
    >>> from_file(f"{file}:short", budget=0.25).keep.budget
    Budget(amount=0.25)
    """
    return _built(name, load_function(name), hyper)


def from_given(given: Sequence[Own], name: str, /, **hyper: Any) -> Method:
    """Build the method that "file.py:function" names by the function of that name in `given`.

    given: functions and Python files; no other file is imported. The spec names the file that the function
    came from. Raises InputError as `from_file` does, and if the function is not in `given`.
    """
    function = name.rpartition(":")[2]
    for one in given:
        if callable(one) and getattr(one, "__name__", "") == function:
            file = inspect.getsourcefile(one) if inspect.isfunction(one) else None
            return _built(f"{file or '<given>'}:{function}", one, hyper)
    files = [os.fspath(one) for one in given if not callable(one)]
    for file in files:
        if len(files) == 1 or hasattr(_module(file), function):
            return from_file(f"{file}:{function}", **hyper)
    raise InputError(_not_run(name))


@contextlib.contextmanager
def only_given(given: Iterable[Own]) -> Iterator[None]:
    """Within this context no Python file is imported but the given ones, whatever text or file names one."""
    before = _GIVEN.set(frozenset(os.path.realpath(one) for one in given if not callable(one)))
    try:
        yield
    finally:
        _GIVEN.reset(before)


def _built(name: str, function: Callable[..., Any], hyper: dict[str, Any]) -> Method:
    _check_arguments(name, function, hyper)
    hyper = checked(name, function, hyper)
    try:
        built = function(**hyper)
    except ValueError:
        raise  # a word of the grammar rejected a value, and its message has the reason
    except Exception as error:
        file = str(Path(name.rpartition(":")[0]).expanduser())
        raise InputError(
            f"{name} failed: {_what(error, file)}: correct the function and run again"
        ) from error
    if not isinstance(built, Method):
        raise InputError(
            f"{name} returned {type(built).__name__}, expected a kvjax.grammar.Method: "
            "return what kvjax.chain(...) or a function of kvjax.methods returns"
        )
    built = built.called((name, tuple(sorted(hyper.items()))))
    check(built)
    check_declared(built.keep)
    return built


def load_function(name: str) -> Callable[..., Any]:
    """Load the function that `path/to/file.py:function` names; the file is imported again if it has changed.

    Raises InputError if the file or the function is missing, or the file fails to import.
    """
    file, _, function = name.rpartition(":")
    if not file.endswith(".py") or not function:
        raise InputError(f"{name!r} names no method of a file, expected path/to/file.py:function")
    given = _GIVEN.get()
    if given is not None and os.path.realpath(Path(file).expanduser()) not in given:
        raise InputError(_not_run(name))
    module = _module(file)
    found = getattr(module, function, None)
    if callable(found):
        return found
    own = [n for n, x in vars(module).items() if inspect.isfunction(x) and x.__module__ == module.__name__]
    near = difflib.get_close_matches(function, own, 1)
    hint = f"did you mean {near[0]}?" if near else f"it defines {', '.join(own) or 'no function'}"
    raise InputError(f"{file} has no function {function!r}: {hint}")


def _not_run(name: str) -> str:
    return (
        f"{name!r} is Python code, which is not run because a file names it: if you trust it, name it "
        f"yourself (methods={name.rpartition(':')[0]!r} or its function; --methods or --set of a command)"
    )


def sources(methods: Iterable[Method]) -> list[str]:
    """List the user's files that define these methods or their words, each as "name.py digest".

    Stored results are valid only as long as these files are unchanged.
    """
    files = {file for method in methods for file in (*_files_of_spec(method.spec), *_files_of_words(method))}
    digests = {file: hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] for file in files}
    return sorted(f"{Path(file).name} {digest}" for file, digest in digests.items())


def _files_of_spec(spec: tuple[Any, ...]) -> Iterator[str]:
    for name, *_ in parts_of(spec):
        file = name.rpartition(":")[0]
        if file.endswith(".py"):
            yield os.path.realpath(Path(file).expanduser())


def _files_of_words(word: Any) -> Iterator[str]:
    if isinstance(word, tuple | frozenset):
        for part in word:
            yield from _files_of_words(part)
    elif dataclasses.is_dataclass(word) and not isinstance(word, type):
        module = sys.modules.get(type(word).__module__)
        file = getattr(module, "__file__", None)
        if file is not None and not type(word).__module__.startswith("kvjax."):
            yield os.path.realpath(file)
        for field in dataclasses.fields(word):
            yield from _files_of_words(getattr(word, field.name))


def _module(file: str) -> ModuleType:
    path = Path(file).expanduser()
    try:
        state = path.stat()
    except OSError as error:
        raise InputError(
            f"{file} cannot be read ({error.strerror}, looked in {Path.cwd()}): "
            "expected the Python file of a method, give its path"
        ) from error
    if not path.is_file():
        raise InputError(f"{file} is a directory, expected a Python file: give path/to/file.py:function")
    return _import(os.path.realpath(path), (state.st_mtime_ns, state.st_size))


@cache
def _import(path: str, version: tuple[int, int]) -> ModuleType:
    """Import the module of a file once per version: its classes, and so equal methods, stay equal."""
    digest = hashlib.sha256(f"{path}{version}".encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(f"kvjax_user_{digest}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module in sys.modules while the file is still running.
    sys.modules[spec.name] = module
    # Makes modules beside the file importable. At the end of the path, they do not shadow installed ones.
    folder = str(Path(path).parent)
    sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise InputError(
            f"{path} failed to import: {_what(error, path)}: correct the file and run again"
        ) from error
    finally:
        sys.path.remove(folder)
    return module


def _what(error: Exception, file: str) -> str:
    """Describe the error in one line, with the line of the user's file that it came from."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError in line {error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if os.path.realpath(frame.filename) == os.path.realpath(file)]
    where = f" in line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}{where}: {error}"


def _check_arguments(name: str, function: Callable[..., Any], hyper: dict[str, Any]) -> None:
    known = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        for key in hyper:
            if key not in known:
                near = difflib.get_close_matches(key, list(known), 1)
                hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known) or 'none'}"
                raise InputError(f"method {name} has no hyper-parameter {key!r}: {hint}")
    needed = [
        n
        for n, p in known.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and n not in hyper
    ]
    if needed == ["budget"]:
        raise InputError(f"method {name} needs budget=: a fraction such as 0.25, or a number of slots")
    if needed:
        raise InputError(
            f"method {name} needs a value for {', '.join(needed)}: write {name}:{needed[0]}=VALUE"
        )
