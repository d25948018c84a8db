"""The scaling table: its data has every cell once, and what fits its device does."""

from scripts.studies import plan_table as script


def test_the_data_has_every_cell_once_and_what_fits_fits():
    cells = script.DATA.read()["cells"]
    names = [(one["topology"], one["asked"], one["model"], one["method"]) for one in cells]
    assert len(set(names)) == len(names) and set(names) <= set(script.cells())
    for one in cells:
        held, step = one["weights"] + one["cache"], one["decode"]
        assert (step is None) == (held > one["memory"])
        if one["fits"]:
            assert held <= step["needs"] <= one["memory"]
