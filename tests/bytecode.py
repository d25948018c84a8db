"""The bytecode of a run: every module of kvjax with `tests.checked` around its functions, and the tests.

A fresh clone has none, and compiling it takes a twentieth of the run. So it is kept beside the modules, and
the processes of a run compile a share each before they import anything.
"""

import ast
import builtins
import os
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path

from _pytest.assertion import rewrite

# Another number makes what `_with_checks` wrote before invalid.
ENDING = ".checked1.pyc"
ROOT = Path(__file__).parents[1]
IMPORT = "from tests import checked as checked_by_tests"


def keep() -> None:
    """Have this process, and the commands that tests start, write the bytecode that they compile."""
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


class Finder:
    """Find modules of kvjax, with checks around their functions."""

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> ModuleSpec | None:
        if name.split(".")[0] != "kvjax":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(name, spec.loader.path)
        return spec


class Loader(SourceFileLoader):
    """Compile a module with checks around its functions; its bytecode has a name of its own."""

    def source_to_code(self, data, path, *, _optimize=-1):
        tree = _with_checks(ast.parse(data, path))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def get_data(self, path):
        return super().get_data(_own(path))

    def set_data(self, path, data, **how):
        super().set_data(_own(path), data, **how)


def _own(path: str) -> str:
    return path.removesuffix(".pyc") + ENDING if path.endswith(".pyc") else path


def _with_checks(module: ast.Module) -> ast.Module:
    """Add the check as the innermost decorator, which sees the annotations as they are written."""
    for function in _functions(module.body):
        if _may_have_arrays(function):
            check = ast.Name("checked_by_tests", ast.Load())
            function.decorator_list.append(ast.copy_location(check, function))
    first = next((i for i, line in enumerate(module.body) if not _stands_first(line)), len(module.body))
    module.body[first:first] = ast.parse(IMPORT).body
    return module


def _functions(statements: Iterable[ast.AST]) -> Iterator[ast.FunctionDef]:
    for statement in statements:
        if isinstance(statement, ast.FunctionDef):
            yield statement
        for inside in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _functions(getattr(statement, inside, ()))


def _may_have_arrays(function: ast.FunctionDef) -> bool:
    """Whether an annotation is more than names of builtins."""
    of = function.args
    arguments = [*of.posonlyargs, *of.args, *of.kwonlyargs, of.vararg, of.kwarg]
    hints = [argument.annotation for argument in arguments if argument is not None] + [function.returns]
    parts = [part for hint in hints if hint is not None for part in ast.walk(hint)]
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    quoted = any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts)
    return quoted or not names <= vars(builtins).keys()


def _stands_first(line: ast.stmt) -> bool:
    docstring = isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
    return docstring or isinstance(line, ast.ImportFrom) and line.module == "__future__"


def compile_share(config) -> None:
    """Compile what the process of a whole run is to compile of what has never been compiled."""
    of = getattr(config, "workerinput", None)
    if of is None or [str(arg) for arg in config.args] != config.getini("testpaths"):
        return
    folders = ("kvjax", "models", "pallas_kernels", "configs", "tests")
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    for file in files[int(of["workerid"].removeprefix("gw")) :: of["workercount"]]:
        if not file.is_relative_to(ROOT / "tests"):
            if not Path(_own(cache_from_source(str(file)))).exists():
                Loader(file.stem, str(file)).get_code(file.stem)
        elif file.name.startswith("test_"):
            _compile_test(file, config)


def _compile_test(file: Path, config) -> None:
    """Write the bytecode of a test as pytest does when it imports it."""
    kept = rewrite.get_cache_dir(file) / (file.stem + rewrite.PYC_TAIL)
    if not kept.exists() and rewrite.try_makedirs(kept.parent):
        status, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, status, kept)
