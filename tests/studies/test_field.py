"""The study of what the field leaves open: rows are sentences, a run goes on, and the page has its data."""

import json

import numpy as np
import pytest

import kvjax
from kvjax.eval.tasks.recall import WORDS
from kvjax.io.load import load
from scripts.studies import field
from scripts.studies.field_rows import AGAIN, ROWS, sentence
from scripts.studies.runner import Data

NAMES = ("int4", "4 sinks", "keydiff", "keydiff, again")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Set up the study of the shipped model on a text of its own words; return the run's folder."""
    words = np.random.default_rng(0).choice(WORDS[4:], 2000)
    (tmp_path / "words.txt").write_text(" ".join(words))
    monkeypatch.setattr(field, "TEXT", tmp_path / "words.txt")
    monkeypatch.setattr(field, "LENGTH", 48)
    monkeypatch.setattr(field, "DATA", Data(tmp_path / "field.json", {"about": {}, "rows": {}}))
    return tmp_path / "run"


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_a_sentence_that_a_text_builds_again(name):
    built = sentence(ROWS[name])
    assert kvjax.method(repr(built)) == built


def test_rows_that_differ_have_other_sentences():
    once = [repr(sentence(row)) for row in ROWS.values() if not row.again]
    assert len({*once}) == len(once)
    for name, row in ROWS.items():
        if row.again:
            assert sentence(row) == sentence(ROWS[name.removesuffix(", again")])


def test_a_run_measures_what_is_missing_and_its_rows_become_data(small, monkeypatch):
    field.run("recall-tiny", small, NAMES[:1], None)
    first = (small / "once" / "units.jsonl").read_bytes()
    field.run("recall-tiny", small, NAMES, None)
    assert (small / "once" / "units.jsonl").read_bytes().startswith(first)
    field.collect(small)
    found = field.DATA.read()
    assert {*found["rows"]} == {*NAMES} and found["about"]["length"] == 48
    full = load("recall-tiny")
    for name, row in found["rows"].items():
        assert len(row["kl"]) == len(row["late"]["kl"]) == field.WINDOWS and 0 < row["kept"] < 1
        assert (row["late"]["first"], row["late"]["last"]) == (AGAIN + 1, 128)
        assert kvjax.method(row["sentence"]) == sentence(ROWS[name])
    assert found["about"]["fingerprint"] == full.fingerprint
    # Until the second compression both read the same tokens over the same slots.
    once, again = (found["rows"][name] for name in ("keydiff", "keydiff, again"))
    assert once["late"] != again["late"]
    assert not field.second_table(found["rows"]).split("| keydiff |")[1].startswith(" not measured")


def test_an_unknown_row_is_named_with_the_known_ones(small):
    with pytest.raises(kvjax.InputError, match="'int5' is no row, expected some of int8, int4"):
        field.run("recall-tiny", small, ["int5"], None)


def test_differences_are_paired_by_window():
    a = np.array([0.1, 0.2, 0.4, 0.8, 1.6, 3.2])
    row = lambda kl: {"kl": [*kl], "top1": [1.0] * 6, "bfloat16": 0.5}  # noqa: E731
    text = field.topic_table({"x": row(a), "y": row(a + 0.01)}, ("x", "y", "z"))
    # Windows differ by far more than the rows do, and the pairs all by 0.01.
    assert "| y | 50.0 | 1.0600 [" in text and "| +0.0100" in text and "| z | not measured yet |" in text
    noisy = field.topic_table({"x": row(a), "y": row(a + 0.01 + a / 100)}, ("x", "y"))
    low, high = (float(x) for x in noisy.split("| +0.0205 [")[1].split("]")[0].split(", "))
    assert 0.01 < low < 0.0205 < high < 0.05


def test_the_page_has_the_tables_of_its_data():
    assert field.PAGE.agrees()
    found = field.DATA.read()
    assert {*found["rows"]} <= {*ROWS} and json.dumps(found)
    for name, row in found["rows"].items():
        assert kvjax.method(row["sentence"]) == sentence(ROWS[name])
        # Codes of as many bits take up to twice their share of float32, slots without codes the same.
        assert row["kept"] - 0.001 <= row["bfloat16"] <= 2 * row["kept"]
