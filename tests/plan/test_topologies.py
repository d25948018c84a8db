"""Topologies: how many devices a name means, and what is said of names that mean none."""

import pytest

from kvjax.base.errors import InputError
from kvjax.plan.topologies import KNOWN, topology_of


@pytest.mark.parametrize(
    ("name", "count", "gib"),
    [
        ("v5e:4x4", 16, 15.75), ("v5e:16x16", 256, 15.75), ("v5p:4x4x4", 64, 95.74), ("v6e:4x4", 16, 31.25),
        ("tpu7x:2x2x1", 8, 94.75), ("h100:8", 8, 79.64),
    ],
)  # fmt: skip
def test_a_topology_has_its_devices_and_their_memory(name, count, gib):
    found = topology_of(name)
    assert name in KNOWN and found.count == count
    assert found.memory == pytest.approx(gib * 2**30, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("v5x:4x4", "did you mean v5e:4x4?"), ("v5p:4x4", "expected v5p:AxBxC: did you mean v5p:4x4x4?"),
        ("v5e", "did you mean v5e:4x4?"), ("h100", "did you mean h100:8?"), ("h100:0", "mean h100:8?"),
        ("", "expected one such as v5e:4x4"), ("v6e:4xx", "did you mean v6e:4x4?"),
    ],
)  # fmt: skip
def test_an_unknown_topology_is_told_the_nearest(name, says):
    with pytest.raises(InputError) as error:
        topology_of(name)
    assert repr(name) in str(error.value) and says in str(error.value)
