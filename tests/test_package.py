"""The package is found whole wherever it lies: installed, or as a bare checkout on Python's path."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[1]
# -S: no site-packages, so no installed kvjax helps; jax is not needed to find a module.
FIND = """
import importlib.util, sys
sys.path.insert(0, sys.argv[1])
import kvjax
for room in ("models", "pallas_kernels", "configs", "base"):
    print(importlib.util.find_spec(f"kvjax.{room}").origin)
"""


NOTHING_ELSE = """
import importlib.util, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import kvjax
for name in ("tests", "kvjax", "scripts", "docs", "setup"):
    print(importlib.util.find_spec(f"kvjax.{name}"))
print(sorted({one.name for one in pkgutil.iter_modules(kvjax.__path__)} & {"kvjax", "tests", "models"}))
"""
BESIDE = """
import kvjax
print(kvjax.InputError.__module__, kvjax.__file__, kvjax.__spec__.origin)
import kvjax.base.errors, kvjax.configs
print(kvjax.base.errors.__file__, kvjax.configs.__file__)
"""


def found(folder: Path, code: str = FIND) -> list[str]:
    run = [sys.executable, "-S", "-c", code, str(folder)]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()


def copied(folder: Path) -> Path:
    """Copy a checkout in little, with what it has beside the package."""
    for name in ("kvjax", "kvjax/base", "configs", "models", "pallas_kernels", "tests", "docs"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
    for name in ("kvjax/__init__.py", "kvjax/base/errors.py", "setup.py"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "scripts" / "editable", folder / "scripts" / "editable")
    return folder


def test_a_checkout_on_the_path_has_all_its_rooms(tmp_path):
    rooms = ("kvjax", "models", "pallas_kernels", "configs")
    for room in rooms:
        (tmp_path / room).symlink_to(ROOT / room)
    beside = [str(tmp_path / room / "__init__.py") for room in rooms[1:]]
    assert found(tmp_path) == [*beside, str(tmp_path / "kvjax" / "base" / "__init__.py")]


def test_an_installed_package_looks_into_itself_alone(tmp_path):
    package = tmp_path / "kvjax"
    package.mkdir()
    for name in ("__init__.py", "base"):
        (package / name).symlink_to(ROOT / "kvjax" / name)
    for room in ("models", "pallas_kernels", "configs"):
        (package / room).symlink_to(ROOT / room)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    inside = [str(package / room / "__init__.py") for room in ("models", "pallas_kernels", "configs")]
    assert found(tmp_path) == [*inside, str(package / "base" / "__init__.py")]


def test_a_checkout_holds_no_module_but_its_rooms(tmp_path):
    assert found(copied(tmp_path), NOTHING_ELSE) == ["None"] * 5 + ["[]"]


def test_a_script_beside_a_clone_imports_the_package(tmp_path, monkeypatch):
    clone = copied(tmp_path / "kvjax")
    (tmp_path / "script.py").write_text(BESIDE)
    # What `pip install -e` writes into site-packages puts the folder that setup.py names onto the path.
    given = {}
    monkeypatch.setattr(sys, "argv", ["setup.py", "editable_wheel"])
    tools = SimpleNamespace(setup=given.update, find_packages=None)
    monkeypatch.setitem(sys.modules, "setuptools", tools)
    monkeypatch.chdir(clone)
    runpy.run_path("setup.py")
    assert given["packages"] == ["kvjax"] and set(given["package_dir"]) == {""}
    env = os.environ | {"PYTHONPATH": str(clone / given["package_dir"][""])}
    for script, folder in ((tmp_path / "script.py", tmp_path), (tmp_path / "script.py", clone)):
        run = [sys.executable, "-S", str(script)]
        out = subprocess.run(run, cwd=folder, env=env, capture_output=True, text=True, check=True).stdout
        home = clone / "kvjax"
        assert out.split() == [
            "kvjax", *[str(home / "__init__.py")] * 2,
            str(home / "base" / "errors.py"), str(clone / "configs" / "__init__.py"),
        ]  # fmt: skip
