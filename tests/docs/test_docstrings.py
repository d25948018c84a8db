"""The examples in docstrings run as they stand there."""

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
from importlib.util import find_spec
from pathlib import Path

import pytest

import kvjax
import kvjax.models
import kvjax.pallas_kernels
import kvjax.words

# In a checkout, rooms of the package lie beside `kvjax/`, whose second path is the folder of them all.
ROOMS = (kvjax, kvjax.models, kvjax.pallas_kernels)
MODULES = sorted({
    module.name
    for room in ROOMS
    for module in pkgutil.walk_packages(room.__path__[:1], f"{room.__name__}.")
    if not module.name.endswith(("__main__", "eval.harness.model", "serve.http.app"))  # they need more
})  # fmt: skip


def examples(name):
    """List the doctests of a module that hold an example."""
    tests = doctest.DocTestFinder().find(importlib.import_module(name), name)
    return [test for test in tests if test.examples]


# Examples of operations, codecs and training compile one by one, and these make a model, a cache or a picture
# for theirs; their own tests compute the same and more every time.
IN_TURN = ("kvjax.ops.", "kvjax.store.", "kvjax.train.")
SLOW = (
    "api.block_transformer", "api.contexts", "api.fork", "api.generate", "api.join", "api.kept_texts",
    "api.likelihood", "api.logit_processors", "api.long_text", "api.rollback", "api.sampling", "api.scores",
    "api.speculate", "api.step", "api.summary", "api.verify", "eval.report.page",
    "eval.report.scores_picture", "fitting", "fitting.gates.dropping", "fitting.prompts.links",
    "fitting.statistics.file_coders", "io.cache_file", "io.cache_stream", "keep.budgets.preference",
    "keep.merges.low_pass", "models.transformer", "nnx", "prompts.classifier", "prompts.shorten", "pure",
    "read.blocks", "read.by_queries", "read.channels", "read.events", "read.hashed", "read.low_bits",
    "read.thresholds", "serve.device.run", "state.cache",
)  # fmt: skip
SHOWING = [name for name in MODULES if ">>> " in Path(find_spec(name).origin).read_text()]
CASES = [
    pytest.param(name, marks=pytest.mark.rotating)
    if name.startswith(IN_TURN) or name.removeprefix("kvjax.") in SLOW
    else name
    for name in SHOWING
]


@pytest.mark.parametrize("name", CASES)
def test_examples_compute_what_they_show(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(verbose=False)
    for test in examples(name):
        runner.run(test)
    assert runner.failures == 0, f"run: python -m doctest on {name}"


def test_the_examples_are_found():
    assert {f"kvjax.{name}" for name in SLOW} <= {*SHOWING}
    assert len(examples("kvjax.ops.recurrent.linear_attention")) > 5
    assert examples("kvjax.models.exchange") and "kvjax.models.exchange" in SHOWING and len(MODULES) > 200


def test_modules_without_examples_are_imported_alone():
    assert all(importlib.import_module(name) for name in MODULES if name not in SHOWING)


PUBLIC = {f"kvjax.{name}": getattr(kvjax, name) for name in kvjax.__all__} | {
    f"kvjax.words.{name}": getattr(kvjax.words, name) for name in kvjax.words.__all__
}
# Types of hyper-parameters and instances of documented classes have no docstring of their own.
DOCUMENTED = {
    name: found for name, found in PUBLIC.items()
    if inspect.ismodule(found) or inspect.isfunction(found) or inspect.isclass(found)
}  # fmt: skip
# They take nothing that they could refuse.
NEVER_RAISE = ("kvjax.fetch", "kvjax.words.dense", "kvjax.words.rank", "kvjax.words.standardised")


def arguments(found):
    """List what a caller gives: a function's parameters, or fields that a class adds to those of its base."""
    if inspect.isfunction(found):
        return [*inspect.signature(found).parameters]
    if dataclasses.is_dataclass(found):
        own = {field.name for field in dataclasses.fields(found) if field.init}
        return [name for name in found.__annotations__ if name in own]
    return [*getattr(found, "_fields", ())]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_public_name_has_its_arguments_errors_and_an_example(name):
    found = DOCUMENTED[name]
    text = inspect.cleandoc((kvjax.methods.methods if name == "kvjax.methods" else found).__doc__)
    assert ">>>" in text
    listed = text.replace("\n    *", "\n    ").replace("\n    *", "\n    ")  # *args, **kwargs
    assert [arg for arg in arguments(found) if f"\n    {arg}: " not in listed] == []
    if inspect.isfunction(found):
        nothing = inspect.signature(found).return_annotation in (None, "None", type(None))
        assert ("\nReturns:\n" in text) is not nothing
        assert not arguments(found) or "\nRaises:\n" in text or name in NEVER_RAISE
