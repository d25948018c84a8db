"""A user's own method that cannot run is refused before any other method does."""

import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.eval.run.cellplan import PlannedCell
from kvjax.eval.run.traced import check_traced
from kvjax.grammar import Budget, Keep, Method
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.scores.score import KeyNorm

FILE = """
from __future__ import annotations
import dataclasses
from kvjax.grammar import Budget, Keep, Method
from kvjax.keep.algebra import Word
from kvjax.keep.budgets.budget import Uniform

@dataclasses.dataclass(frozen=True)
class PerRow(Word):
    \"\"\"One score for a whole row.\"\"\"

    def __call__(self, view, seen):
        return view.k.sum((1, 2, 3))

@dataclasses.dataclass(frozen=True)
class Broken(Word):
    \"\"\"Fails where it is asked.\"\"\"

    def __call__(self, view, seen):
        return view.keys

def per_row(budget: float) -> Method:
    return Method(Keep(PerRow(), Budget(budget), Uniform()))

def broken(budget: float) -> Method:
    return Method(Keep(Broken(), Budget(budget), Uniform()))
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("per_row", r"own.py:per_row cannot run: PerRow\(\) gave scores: float32 of shape \[1\], expected"),
        ("broken", r"own.py:broken cannot run: .*'View' object has no attribute 'keys' \(AttributeError\)"),
    ],
)
def test_a_method_that_cannot_run_is_refused_before_anything_is_written(tmp_path, name, message):
    (tmp_path / "own.py").write_text(FILE)
    with pytest.raises(InputError, match=message):
        kvjax.compare(methods=[f"{tmp_path / 'own.py'}:{name}"], samples=1, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_methods_of_the_library_are_not_traced(monkeypatch):
    asked = []
    monkeypatch.setattr("kvjax.eval.run.traced.made", lambda model, method: asked.append(method) or model)
    own = Method(Keep(KeyNorm(), Budget(8), Uniform()))
    entries = [PlannedCell("h2o", 8, kvjax.method("h2o", budget=8)), PlannedCell("own", 8, own)]
    check_traced(kvjax.load("recall-tiny"), entries, 64)
    assert asked == [own]
