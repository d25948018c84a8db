"""Which part of the suite runs: `--every N` thins all tests out, `--rotate` adds cases that take turns.

A test marked `rotating` is left out of the plain suite. `--rotate 3/20` adds the fourth twentieth of them
(parts count from 0), `--rotate all` all. The gate takes another part every hour, so that changes of one day
meet different cases.

Tests of one file share what was compiled and computed before them: one process runs a whole file, or a whole
group that its tests name (`xdist_group`).
"""

import argparse
import re

import pytest


def count(text: str) -> int:
    """A whole number from 1 on; what else is given, pytest refuses in a line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text}")
    return int(text)


def part(text: str) -> tuple[int, int]:
    """(K, N) of "K/N" with 0 <= K < N; "all" is the one part that there is."""
    match = re.fullmatch(r"(\d+)/(\d+)", "0/1" if text == "all" else text)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"expected all or a part such as 0/20 to 19/20, got {text}")
    return int(match[1]), int(match[2])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every", type=count, default=1, metavar="N",
        help="of every test each N-th case, and all cases of each N-th method and architecture",
    )  # fmt: skip
    parser.addoption(
        "--rotate", type=part, default=None, metavar="K/N|all",
        help="also part K of N of the cases marked rotating, or all of them",
    )  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what `--rotate` and `--every` do not ask for, and makes a group of every file."""
    in_turn = _in_turn(items, config.getoption("--rotate"))
    asked = [item for item in items if not item.get_closest_marker("rotating") or item in in_turn]
    kept = _every(asked, config.getoption("--every"))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
    for item in items:
        if _group(item) is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.split("::")[0]))


def _group(item: pytest.Item) -> str | None:
    """Tests of one group share programs: half of a group would compile what all does."""
    marker = item.get_closest_marker("xdist_group")
    return marker.args[0] if marker else None


def _in_turn(items: list[pytest.Item], rotate: tuple[int, int] | None) -> set[pytest.Item]:
    """The rotating tests whose turn it is; those of a group take their turn together."""
    if rotate is None:
        return set()
    at, parts = rotate
    numbers: dict[object, int] = {}
    rotating = [item for item in items if item.get_closest_marker("rotating")]
    for item in rotating:
        numbers.setdefault(_group(item) or item, len(numbers))
    return {item for item in rotating if numbers[_group(item) or item] % parts == at}


def _every(items: list[pytest.Item], every: int) -> set[pytest.Item]:
    """Each `every`-th case of a test and each `every`-th group, but of no test nothing."""
    groups: dict[str, int] = {}
    cases: dict[tuple[object, ...], list[tuple[bool, pytest.Item]]] = {}
    for item in items:
        test = cases.setdefault((item.path, getattr(item, "originalname", item.name)), [])
        group = _group(item)
        number = groups.setdefault(group, len(groups)) if group else len(test)
        test.append((number % every == 0, item))
    kept = {item for test in cases.values() for stays, item in test if stays}
    return kept | {test[0][1] for test in cases.values() if not any(stays for stays, _ in test)}
