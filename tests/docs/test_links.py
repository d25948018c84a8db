"""External addresses and arXiv ids are well-formed; `scripts/links.py --ask` says whether they answer."""

import collections

import pytest

from kvjax.methods import METHODS
from scripts import links


def test_no_address_and_no_arxiv_id_is_malformed():
    addresses, ids = links.everywhere()
    assert links.malformed() == []
    assert {made.paper.arxiv for made in METHODS.values()} - {""} <= set(ids)
    assert len(addresses) > 30


def test_methods_of_one_paper_have_one_title():
    titles = collections.defaultdict(set)
    for made in METHODS.values():
        titles[made.paper.arxiv].add(made.paper.title)
    assert {arxiv: named for arxiv, named in titles.items() if arxiv and len(named) > 1} == {}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [("2413.14469", "month 13"), ("2404.1446", "5 digits"), ("1404.14469", "4 digits"),
     ("24.0414469", "YYMM"), ("9912.00001", "of 2099-12")],
)  # fmt: skip
def test_what_is_no_arxiv_id_is_said(wrong, why):
    assert why in links.wrong_id(wrong)


def test_a_catalogue_with_another_id_is_said(tmp_path):
    catalogue = tmp_path / "c.tsv"
    catalogue.write_text("id\tarxiv\nsnapkv\t2404.14469\nh2o\t2306.00000\nint8\t\nelse\t1\n")
    assert links.other(catalogue) == [f"h2o: {METHODS['h2o'].paper.arxiv} here, 2306.00000 there"]
