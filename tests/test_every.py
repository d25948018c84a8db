"""What `--every` leaves out."""

import argparse
from types import SimpleNamespace

import pytest

from tests.every import count, pytest_collection_modifyitems


class Item:
    """A pytest.Item."""

    path = "tests/test_x.py"

    def __init__(self, test, case, group=None):
        self.name = self.originalname = test
        self.case, self.group = case, group

    def get_closest_marker(self, name):
        assert name == "xdist_group"
        return self.group and SimpleNamespace(args=(self.group,))


class Asked:
    """A pytest.Config of `--every N`."""

    def __init__(self, every):
        self.every, self.left_out = every, []
        self.hook = SimpleNamespace(pytest_deselected=lambda items: self.left_out.extend(items))

    def getoption(self, name):
        assert name == "--every"
        return self.every


@pytest.mark.parametrize("every", [1, 2, 3, 50])
def test_no_test_is_left_out_and_groups_stay_together(every):
    items = [Item("plain", n) for n in range(7)]
    items += [Item(test, method, method) for test in ("first", "second") for method in "abcdef"]
    items += [Item("rare", "f", "f"), Item("alone", 0)]
    kept, asked = items[:], Asked(every)
    pytest_collection_modifyitems(asked, kept)
    assert {x.originalname for x in kept} == {x.originalname for x in items}
    assert [x.case for x in kept if x.originalname == "plain"] == list(range(0, 7, every))
    first, second = ([x.case for x in kept if x.originalname == name] for name in ("first", "second"))
    assert first == second == list("abcdef")[::every]
    assert len(kept) + len(asked.left_out) == len(items)
    assert [x for x in items if x in kept] == kept


def test_what_is_no_count_is_refused():
    assert count("4") == 4
    for text in ("0", "-1", "half"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"from 1 on, got {text}"):
            count(text)
