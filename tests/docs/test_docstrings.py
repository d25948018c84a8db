"""The examples in docstrings run as they stand there."""

import doctest
import importlib
import pkgutil

import pytest

import kvjax
import kvjax.models
import kvjax.pallas_kernels

# In a checkout, rooms of the package lie beside `kvjax/`, whose second path is the folder of them all.
ROOMS = (kvjax, kvjax.models, kvjax.pallas_kernels)
MODULES = sorted({
    module.name
    for room in ROOMS
    for module in pkgutil.walk_packages(room.__path__[:1], f"{room.__name__}.")
    if not module.name.endswith(("__main__", "eval.harness.model"))  # the second needs lm_eval
})  # fmt: skip


def examples(name):
    """The doctests of a module that hold an example."""
    tests = doctest.DocTestFinder().find(importlib.import_module(name), name)
    return [test for test in tests if test.examples]


# Examples of operations, codecs and training compile one by one, and these make a model, a cache or a picture
# for theirs; their own tests compute the same and more every time.
IN_TURN = ("kvjax.ops.", "kvjax.store.", "kvjax.train.")
SLOW = (
    "block_transformer", "cache_file", "context", "eval.report.page", "eval.report.scores_picture", "fitting",
    "fitting.droppings", "forking", "generation", "keep.preference", "models.transformer", "nnx", "oracle",
    "place.rollback", "place.rows", "processors", "pure", "read.blocks", "read.channels", "read.hashed",
    "sampling", "verifying",
)  # fmt: skip
CASES = [
    pytest.param(name, marks=pytest.mark.rotating)
    if name.startswith(IN_TURN) or name.removeprefix("kvjax.") in SLOW
    else name
    for name in MODULES
]


@pytest.mark.parametrize("name", CASES)
def test_examples_compute_what_they_show(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(verbose=False)
    for test in examples(name):
        runner.run(test)
    assert runner.failures == 0, f"run: python -m doctest on {name}"


def test_the_examples_are_found():
    assert len(examples("kvjax.ops.recurrent.linear_attention")) > 5
    assert examples("kvjax.models.exchange") and "kvjax.models.exchange" in MODULES and len(MODULES) > 200
