"""The page of the scaling table shows what its data says."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import plan_table

    return plan_table


def test_the_page_shows_the_data(script):
    page = (ROOT / "docs" / "scaling-table.md").read_text()
    for context in script.CONTEXTS:
        _, _, rest = page.partition(f"<!-- plan {context} -->\n")
        shown, mark, _ = rest.partition(f"\n<!-- end of plan {context} -->")
        assert mark and shown == script.table(context)


def test_the_data_has_every_cell_once_and_what_fits_fits(script):
    cells = script.load()["cells"]
    names = [(one["topology"], one["asked"], one["model"], one["method"]) for one in cells]
    assert len(set(names)) == len(names) and set(names) <= set(script.cells())
    for one in cells:
        held, step = one["weights"] + one["cache"], one["decode"]
        assert (step is None) == (held > one["memory"])
        if one["fits"]:
            assert held <= step["needs"] <= one["memory"]
