"""The study of serving: the page shows its data, every cell is there, and fewer bytes never serve fewer."""

from scripts.studies import serving as script


def test_the_page_shows_every_cell_of_the_data():
    data = script.DATA.read()
    assert [(one["system"], one["gib"], one["ratio"]) for one in data["goodput"]] == script.cells()
    assert [one["page"] for one in data["waste"]] == list(script.PAGES)
    assert script.PAGE.agrees() and "roofline" in data["costs"]


def test_fewer_bytes_serve_more_where_memory_is_scarce():
    found = {(one["system"], one["gib"], one["ratio"]): one["rate"] for one in script.DATA.read()["goodput"]}
    for name in script.SYSTEMS[1:]:
        assert found[name, 12, 0.25] > found[name, 12, 1.0] > found[script.SYSTEMS[0], 12, 1.0]
