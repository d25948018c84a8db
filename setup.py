"""Lists the packages: the rooms beside `kvjax/` import from inside it. The rest is in pyproject.toml."""

from setuptools import find_packages, setup

FOLDER = {"kvjax": "kvjax"} | {f"kvjax.{room}": room for room in ("configs", "models", "pallas_kernels")}

setup(
    package_dir=FOLDER,
    packages=[
        *FOLDER,
        *(f"{package}.{below}" for package, folder in FOLDER.items() for below in find_packages(folder)),
    ],
)
