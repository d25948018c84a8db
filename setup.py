"""Lists the packages: the folders beside `kvjax/` are installed inside it. The rest is in pyproject.toml."""

import sys

from setuptools import find_packages, setup

FOLDER = {"kvjax": "kvjax"} | {f"kvjax.{room}": room for room in ("configs", "models", "pallas_kernels")}

if "editable_wheel" in sys.argv:
    # With one folder an editable install is a path entry, which comes before a clone named `kvjax` beside a
    # script. With several folders it would be an import hook, which Python asks last.
    setup(package_dir={"": "scripts/editable"}, packages=["kvjax"])
else:
    setup(
        package_dir=FOLDER,
        packages=[
            *FOLDER,
            *(f"{package}.{below}" for package, folder in FOLDER.items() for below in find_packages(folder)),
        ],
    )
