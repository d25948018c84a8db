"""scripts/long_prompts.py: its table is that of its data, in which memory grows with the prompt."""

import json
from pathlib import Path

import pytest

from kvjax.methods import METHODS

ROOT = Path(__file__).parents[1]


@pytest.fixture
def long_prompts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import long_prompts

    return long_prompts


@pytest.fixture
def found(long_prompts):
    return json.loads(long_prompts.DATA.read_text())


def test_the_table_on_the_page_is_that_of_the_data(long_prompts, found):
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert long_prompts.table(found) in page, "run: python scripts/long_prompts.py --write"


def test_no_method_holds_a_map_of_all_tokens_by_all_tokens(long_prompts, found):
    """Four times the tokens take some four times the bytes; such a map alone would take 16 times as many."""
    short, long = str(long_prompts.SHORT), str(long_prompts.LONG)
    planned = {name: row["planned"] for name, row in found.items()}
    assert set(found) <= set(METHODS)
    assert {name for name, row in planned.items() if row[long] > 5 * row[short]} == set()


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["triattention", "gisting", "neurocache"])
def test_methods_are_planned_with_their_fit_or_what_it_starts_from(long_prompts, monkeypatch, name):
    monkeypatch.setattr(long_prompts, "SHORT", 512)
    monkeypatch.setattr(long_prompts, "LONG", 1024)
    monkeypatch.setattr(long_prompts, "ROOM", 8)
    sizes = long_prompts.planned(name)["planned"]
    assert 0 < sizes["512"] < sizes["1024"]
