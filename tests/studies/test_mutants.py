"""The faults of `scripts/mutants.py` can be planted: each in the one place that it names."""

import pytest

from scripts import mutants


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_has_one_place(mutant):
    assert (mutants.ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new
