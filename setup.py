"""Lists the packages: the rooms beside `kvjax/` import from inside it. The rest is in pyproject.toml."""

import sys

from setuptools import find_packages, setup

FOLDER = {"kvjax": "kvjax"} | {f"kvjax.{room}": room for room in ("configs", "models", "pallas_kernels")}

if "editable_wheel" in sys.argv:
    # One folder gets onto Python's path, and comes before a folder `kvjax` that is no package: a clone beside
    # a script. Several folders would get a hook, which Python asks last.
    setup(package_dir={"": "scripts/editable"}, packages=["kvjax"])
else:
    setup(
        package_dir=FOLDER,
        packages=[
            *FOLDER,
            *(f"{package}.{below}" for package, folder in FOLDER.items() for below in find_packages(folder)),
        ],
    )
