"""Methods keep the slots that their authors' code kept, on the prompts of `recorded.py`."""

import numpy as np
import pytest

from tests.methods.recorded import LENGTHS, cases, kept_by_kvjax


@pytest.mark.parametrize("name", cases())
def test_kept_slots_are_those_of_the_authors_code(name):
    case = cases()[name]
    found = kept_by_kvjax(case.id, case.hyper)
    both = found.keys() & case.kept.keys()
    assert 0 in both
    for row in both:
        for layer, want in enumerate(case.kept[row]):
            np.testing.assert_array_equal(found[row][layer], want, err_msg=f"{LENGTHS[row]} tokens, {layer}")
