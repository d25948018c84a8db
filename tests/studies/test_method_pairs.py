"""The study of pairs: reasons are told apart whatever they are about, and the page has a table of all."""

from pathlib import Path

from scripts.studies.method_pairs import BEFORE, Pair, reason, table


def test_a_reason_is_the_same_whichever_words_and_numbers_it_names():
    one = "h2o + quest cannot work: Votes(Budget(amount=0.5), (1, 2)) leaves 16 slots: use int8"
    other = "tova + loki cannot work: Recent(tokens=3) leaves 4 slots: use int4"
    assert reason(one) == reason(other) == "... leaves n slots"


def test_a_pair_of_every_kind_is_counted_once():
    found = [Pair("snapkv", "int8", "keep x store", ""), Pair("h2o", "kivi", "keep x store", "it evicts")]
    lines = table(found).splitlines()
    assert f"| keep x store | 2 | {BEFORE['keep x store']} | 1 | 1 |" in lines
    assert f"| all | 2 | {BEFORE['all']} | 1 | 1 |" in lines and "| 1 | it evicts |" in lines


def test_the_page_shows_every_kind_of_pair():
    page = (Path(__file__).parents[2] / "docs/pairs.md").read_text()
    assert all(f"| {verbs} | " in page for verbs in BEFORE)
