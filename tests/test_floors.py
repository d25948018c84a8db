"""Folders are layers: import-linter finds the contracts of pyproject.toml kept, and notices a broken one.

Functions of a step are short.
"""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def package(tmp_path):
    """Copy the package as it is installed, with `models` and the others inside."""
    only_python = shutil.ignore_patterns("__pycache__", "fits", "zoo")
    shutil.copytree(ROOT / "kvjax", tmp_path / "kvjax", ignore=only_python)
    for folder in ("models", "pallas_kernels", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / "kvjax" / folder, ignore=only_python)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def linted(folder):
    command = "import sys; sys.path[:1] = ['.']; from importlinter import cli; cli.lint_imports_command()"
    words = [sys.executable, "-c", command, "--no-cache"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    return done.returncode, " ".join(done.stdout.split()) + done.stderr


def test_imports_run_down_and_never_in_circles(package):
    code, said = linted(package)
    assert code == 0 and "Contracts: 7 kept, 0 broken." in said, said


def test_an_upward_import_inside_a_function_is_found(package):
    with (package / "kvjax/ops/base/rope.py").open("a") as file:
        file.write("\n\ndef planted():\n    from kvjax.api import generate\n    return generate\n")
    code, said = linted(package)
    assert code == 1 and "kvjax.ops is not allowed to import kvjax.api" in said, said


def test_jax_below_a_policy_is_found(package):
    with (package / "kvjax/serve/systems/static.py").open("a") as file:
        file.write("\n\ndef planted():\n    from kvjax.base.checks import listed\n    return listed\n")
    code, said = linted(package)
    assert code == 1 and "kvjax.serve.systems is not allowed to import jax" in said, said


# The most lines of a function that runs in a step or a prompt, its docstring included.
LINES = 60


def functions(file):
    tree = ast.walk(ast.parse(file.read_text()))
    return [node for node in tree if isinstance(node, ast.FunctionDef)]


def test_no_function_of_a_step_is_long():
    files = [*(ROOT / "kvjax/steps").rglob("*.py"), ROOT / "kvjax/api/step.py"]
    found = {
        (file.name, node.name): node.end_lineno - node.lineno + 1
        for file in files
        for node in functions(file)
    }
    assert len(found) > 200
    assert {name: lines for name, lines in found.items() if lines > LINES} == {}
