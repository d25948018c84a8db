"""The package is found whole wherever it lies: installed, or as a bare checkout on Python's path."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# -S: no site-packages, so no installed kvjax helps; jax is not needed to find a module.
FIND = """
import importlib.util, sys
sys.path.insert(0, sys.argv[1])
import kvjax
for room in ("models", "pallas_kernels", "configs", "errors"):
    print(importlib.util.find_spec(f"kvjax.{room}").origin)
"""


def found(folder: Path) -> list[str]:
    run = [sys.executable, "-S", "-c", FIND, str(folder)]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_checkout_on_the_path_has_all_its_rooms(tmp_path):
    rooms = ("kvjax", "models", "pallas_kernels", "configs")
    for room in rooms:
        (tmp_path / room).symlink_to(ROOT / room)
    beside = [str(tmp_path / room / "__init__.py") for room in rooms[1:]]
    assert found(tmp_path) == [*beside, str(tmp_path / "kvjax" / "errors.py")]


def test_an_installed_package_looks_into_itself_alone(tmp_path):
    package = tmp_path / "kvjax"
    package.mkdir()
    for name in ("__init__.py", "errors.py"):
        (package / name).symlink_to(ROOT / "kvjax" / name)
    for room in ("models", "pallas_kernels", "configs"):
        (package / room).symlink_to(ROOT / room)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    inside = [str(package / room / "__init__.py") for room in ("models", "pallas_kernels", "configs")]
    assert found(tmp_path) == [*inside, str(package / "errors.py")]
