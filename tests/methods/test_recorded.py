"""Methods keep the slots that their authors' code kept; `recorded.py` says of which prompts."""

import numpy as np
import pytest

from tests.methods.recorded import LENGTHS, cases, kept_by_kvjax


@pytest.mark.parametrize("name", cases())
def test_kept_slots_are_those_of_the_authors_code(name):
    case = cases()[name]
    assert case.kept
    found = kept_by_kvjax(case.id, case.hyper)
    for row, layers in case.kept.items():
        for layer, want in enumerate(layers):
            np.testing.assert_array_equal(found[row][layer], want, err_msg=f"{LENGTHS[row]} tokens, {layer}")
