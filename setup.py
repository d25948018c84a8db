"""Lists the packages: the rooms beside `kvjax/` import from inside it. The rest is in pyproject.toml."""

import sys

from setuptools import find_packages, setup

FOLDER = {"kvjax": "kvjax"} | {f"kvjax.{room}": room for room in ("configs", "models", "pallas_kernels")}

if "editable_wheel" in sys.argv:
    # A single folder is put onto Python's path, before a clone `kvjax` beside a script, which is
    # no package. For several folders a hook is installed, which Python asks last.
    setup(package_dir={"": "scripts/editable"}, packages=["kvjax"])
else:
    setup(
        package_dir=FOLDER,
        packages=[
            *FOLDER,
            *(f"{package}.{below}" for package, folder in FOLDER.items() for below in find_packages(folder)),
        ],
    )
