"""The study of serving: the page shows its data, and every page size is there."""

from scripts.studies import serving as script


def test_the_page_shows_every_page_size_of_the_data():
    data = script.DATA.read()
    assert [one["page"] for one in data["waste"]] == list(script.PAGES)
    assert script.PAGE.agrees() and "roofline" in data["costs"]
