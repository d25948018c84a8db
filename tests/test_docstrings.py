"""The examples in docstrings run as they stand there."""

import doctest
import importlib
import pkgutil

import pytest

import kvjax

MODULES = [
    module.name
    for module in pkgutil.walk_packages(kvjax.__path__, "kvjax.")
    if not module.name.endswith("__main__")
]


def examples(name):
    """The doctests of a module that hold an example."""
    tests = doctest.DocTestFinder().find(importlib.import_module(name), name)
    return [test for test in tests if test.examples]


def in_turn(names):
    """Operations are many and each compiles its own programs; their equations have tests of their own."""
    turn = {name: [pytest.mark.rotating] if name.startswith("kvjax.ops.") else [] for name in names}
    return [pytest.param(name, marks=marks) for name, marks in turn.items()]


@pytest.mark.parametrize("name", in_turn(MODULES))
def test_examples_compute_what_they_show(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(verbose=False)
    for test in examples(name):
        runner.run(test)
    assert runner.failures == 0, f"run: python -m doctest on {name}"


def test_the_examples_are_found():
    assert len(examples("kvjax.ops.recurrent.linear_attention")) > 5 and len(MODULES) > 100
