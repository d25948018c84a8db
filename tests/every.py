"""`--every N`: a part of the suite in which every test still runs, for a second release of jax."""

import argparse

import pytest


def count(text: str) -> int:
    """A whole number from 1 on; what else is given, pytest refuses in a line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text}")
    return int(text)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every", type=count, default=1, metavar="N",
        help="of every test each N-th case, and all cases of each N-th method and architecture",
    )  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what `--every` does not ask for, and of no test all cases.

    Tests that share programs are one group, and stay or go together: half of a group compiles what all does.
    """
    every = config.getoption("--every")
    groups: dict[str, int] = {}
    cases: dict[tuple[object, ...], list[tuple[bool, pytest.Item]]] = {}
    for item in items:
        test = cases.setdefault((item.path, getattr(item, "originalname", item.name)), [])
        group = item.get_closest_marker("xdist_group")
        number = groups.setdefault(group.args[0], len(groups)) if group else len(test)
        test.append((number % every == 0, item))
    kept = {item for test in cases.values() for stays, item in test if stays}
    kept |= {test[0][1] for test in cases.values() if not any(stays for stays, _ in test)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
