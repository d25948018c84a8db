"""A cache in host memory, through the compilers: two layers of it on the device, and copies beside work.

The record is what `kvjax aot --case 'host-*' --topology v5e:2x2,v5p:2x2x1,v6e:2x2,tpu7x:2x2x1,h100` found
(scripts/aot.py).
"""

from importlib.metadata import PackageNotFoundError, version

import pytest

from kvjax.aot.cases import host
from kvjax.aot.hardware import TOPOLOGIES
from kvjax.aot.probe import available, probe
from tests.aot import record
from tests.sweep import sweep

VERSIONS, ROWS = record.read("host")
TPU = [(name, topology) for name in host.CASES for topology in TOPOLOGIES]
GPU = [(name, "h100") for name in host.GPU_CASES]


def assert_comes_by_layers(found, topology):
    """The cache stays where it lies, and arrays of layers come by copies that nobody waits for at once."""
    assert found["host_aliases"] == found["host_arguments"] > 0.85 * found["cache"]
    assert found["host_temporaries"] == 0 and found["aliases"] >= found["cache"]
    assert found["fetches"] >= 4 and found["beside"] >= 2
    layer = found["host_arguments"] / host.CONFIG.layers
    # XLA for GPUs starts all copies as soon as it has memory for them.
    layers = host.CONFIG.layers if topology == "h100" else 2
    assert found["temporaries"] <= 1.05 * layers * layer


@pytest.mark.parametrize(
    ("name", "topology"), sweep(TPU + GPU, ("host-full", "v5e:2x2"), ("host-full", "h100"))
)
def test_a_step_holds_two_layers_and_brings_the_next_one_while_a_layer_computes(name, topology):
    if why := available("gpu" if topology == "h100" else "tpu"):
        pytest.skip(why)
    found = probe(topology, name)
    assert "error" not in found, found
    assert_comes_by_layers(found, topology)
    if compiler(topology) == VERSIONS[library(topology)]:
        row = ROWS[name, topology]
        assert found["temporaries"] <= 1.05 * row["temporaries"] + 2**20
        assert found["beside"] >= row["beside"]


def test_the_record_is_whole_and_says_the_same():
    assert set(ROWS) == {*TPU, *GPU}
    for (_, topology), row in ROWS.items():
        assert_comes_by_layers(row, topology)


def library(topology):
    return "jax-cuda13-plugin" if topology == "h100" else "libtpu"


def compiler(topology):
    try:
        return version(library(topology))
    except PackageNotFoundError:
        return ""
