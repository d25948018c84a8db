"""The comparison with authors' code: its counts on slots by hand, its table, and missing clones."""

import numpy as np
import pytest

from scripts.studies import authors_slots as study


def test_shared_slots_are_counted_over_layers_and_the_least_share_is_that_of_one_layer():
    ours = [np.array([[1, 1, 0, 0]]), np.array([[1, 0, 0, 1]])]
    theirs = [np.array([[1, 1, 0, 0]]), np.array([[0, 1, 1, 1]])]
    found = study.overlap([x == 1 for x in ours], [x == 1 for x in theirs])
    assert found == {"authors": 5, "kvjax": 4, "both": 3, "least": 0.3333}


def test_every_method_of_the_table_was_compared_on_the_same_prompts():
    rows = study.DATA.read()["rows"]
    assert set(rows) == set(study.ROWS)
    assert {tuple(row["prompts"]) for row in rows.values()} == {study.TASKS}
    for id, row in rows.items():
        shared = [found["both"] / found["authors"] for found in row["prompts"].values()]
        assert (min(shared) == 1) or study.ROWS[id].why != "–", id


def test_a_missing_clone_is_named_before_anything_runs(tmp_path):
    with pytest.raises(SystemExit, match="lacks clones of .*git clone https://github.com/"):
        study.check(tmp_path)
