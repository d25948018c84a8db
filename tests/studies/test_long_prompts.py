"""Memory of long prompts: it grows with the prompt, and methods are planned with the fit that they need."""

import pytest

from kvjax.methods import METHODS
from scripts.studies import long_prompts

FOUND = long_prompts.DATA.read()


def test_no_method_holds_a_map_of_all_tokens_by_all_tokens():
    """Four times the tokens take some four times the bytes; such a map alone would take 16 times as many."""
    short, long = str(long_prompts.SHORT), str(long_prompts.LONG)
    planned = {name: row["planned"] for name, row in FOUND.items()}
    assert set(FOUND) <= set(METHODS)
    assert {name for name, row in planned.items() if row[long] > 5 * row[short]} == set()


@pytest.mark.parametrize("name", ["triattention", "gisting", "neurocache"])
def test_methods_are_planned_with_their_fit_or_what_it_starts_from(monkeypatch, name):
    monkeypatch.setattr(long_prompts, "SHORT", 512)
    monkeypatch.setattr(long_prompts, "LONG", 1024)
    monkeypatch.setattr(long_prompts, "ROOM", 8)
    sizes = long_prompts.planned(name)["planned"]
    assert 0 < sizes["512"] < sizes["1024"]
