"""Pairs of the first 132 methods are built: as many as the page says, and not fewer than are listed here."""

from pathlib import Path

from scripts.studies.method_pairs import first_pairs, first_table

PAGE = Path(__file__).parents[2] / "docs/pairs.md"
# The fewest pairs that may be built: with GemFilter, LM-Infinite, HOMER and APE are refused. Keeps that merge
# single slots while decoding are refused with stores that encode tokens together, such as KIVI's and QJL's.
FEWEST = {
    "keep x store": 1110,
    "keep x host": 89,
    "GemFilter before a keep": 86,
    "keep x read": 725,
    "store x read": 130,
    "all": 2807,
}


def test_pairs_of_the_first_methods_are_built():
    found = first_pairs()
    assert {name: built for name, (built, _, _) in found.items() if built < FEWEST[name]} == {}
    assert [of for _, of, _ in found.values()] == [1157, 89, 89, 890, 130, 3722]
    assert first_table(found) in PAGE.read_text()
