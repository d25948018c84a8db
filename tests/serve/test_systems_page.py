"""The page of systems is what their functions say."""

from scripts.site.systems import PAGE, TABLES


def test_the_page_of_systems_has_every_paper_of_the_functions():
    text = PAGE.read_text()
    for made in TABLES.values():
        assert made() in text, "write it anew: python -m scripts.site.systems"
