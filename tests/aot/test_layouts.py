"""A step of every class of layout, as it is compiled for a TPU and a GPU: it writes into its cache.

`scripts/layouts.py --compile cpu,v5e:2x2,h100` writes the record.
"""

import pytest

from kvjax.aot.cases.layouts import SENTENCES
from kvjax.aot.probe import available, probe
from tests.aot.known import COMPILERS, KNOWN, ROWS, VERSIONS, assert_as_recorded, assert_in_place
from tests.sweep import sweep

TARGETS = [target for target in COMPILERS if target != "cpu"]
# Of a step that evicts, one that flushes granules, and one whose pages several heads share.
ALWAYS = [("h2o", "v5e:2x2"), ("quest", "h100"), ("adakv", "h100")]


@pytest.mark.parametrize(("name", "target"), sweep([(n, t) for n in SENTENCES for t in TARGETS], *ALWAYS))
def test_a_step_compiles_writes_into_its_cache_and_copies_no_layer_of_it(name, target):
    if why := available("tpu" if target.startswith("v") else "gpu"):
        pytest.skip(why)
    found = probe(target, f"layout-{name}")
    assert "error" not in found, found
    assert_in_place(target, name, found)
    assert_as_recorded(target, name, found)


def test_the_record_is_whole_and_what_it_says_is_known():
    assert set(ROWS) == {(name, target) for name in SENTENCES for target in COMPILERS}
    assert set(COMPILERS.values()) <= set(VERSIONS)
    for (name, target), row in ROWS.items():
        assert_in_place(target, name, row)


def test_what_is_known_is_known_of_a_class():
    assert set(KNOWN) == set(COMPILERS)
    assert all(set(known) <= set(SENTENCES) for known in KNOWN.values())
