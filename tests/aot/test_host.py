"""A cache in host memory, through the compilers: two layers of it on the device, and copies beside work.

The record is what `kvjax aot --case 'host-*' --topology v5e:2x2,v5p:2x2x1,v6e:2x2,tpu7x:2x2x1,h100` found
(scripts/aot.py); of pages of unequal heads and of reads, what it found for v5e.
"""

from importlib.metadata import PackageNotFoundError, version

import pytest

from kvjax.aot.cases import host
from kvjax.aot.hardware import TOPOLOGIES
from kvjax.aot.probe import available, probe
from tests.aot import record
from tests.sweep import sweep

VERSIONS, ROWS = record.read("host")
LAYERWISE = ("host-full", "host-kivi")
TPU = [(name, topology) for name in LAYERWISE for topology in TOPOLOGIES]
GPU = [(name, "h100") for name in host.GPU_CASES]
PICKED = [(f"host-{name}", "v5e:2x2") for name in host.READS]
FURTHER = [("host-adakv", "v5e:2x2"), *PICKED]
# Keys in 4 bits, and keys rebuilt from a few directions, are decoded on the device, all of a layer.
DECODED = ("host-hcattention", "host-shadowkv")


def assert_stays(found, name):
    """Check that a cache stays in host memory; a step takes half a layer on the device, two if none picks."""
    assert found["host_aliases"] == found["host_arguments"] > 0 and found["host_temporaries"] == 0
    assert found["aliases"] >= found["cache"]
    layers, most = (host.CONFIG.layers, 2.2) if name == "host-adakv" else (host.SHORT.layers, 0.5)
    if name not in DECODED:
        assert found["temporaries"] <= most * found["host_arguments"] / layers


def assert_comes_by_layers(found, topology):
    """Check that the cache stays in place, and arrays of layers come by copies that nobody awaits at once."""
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
    assert_as_recorded(found, name, topology)


@pytest.mark.rotating
@pytest.mark.parametrize(("name", "topology"), FURTHER)
def test_a_step_leaves_in_host_memory_what_it_does_not_read(name, topology):
    if why := available("tpu"):
        pytest.skip(why)
    found = probe(topology, name)
    assert "error" not in found, found
    assert_stays(found, name)
    assert_as_recorded(found, name, topology)


def assert_as_recorded(found, name, topology):
    if compiler(topology) == VERSIONS[library(topology)]:
        row = ROWS[name, topology]
        assert found["temporaries"] <= 1.05 * row["temporaries"] + 2**20
        assert found["beside"] >= row["beside"]


def test_the_record_is_whole_and_says_the_same():
    assert set(ROWS) == {*TPU, *GPU, *FURTHER}
    for name, topology in (*TPU, *GPU):
        assert_comes_by_layers(ROWS[name, topology], topology)
    for name, topology in FURTHER:
        assert_stays(ROWS[name, topology], name)


def library(topology):
    return "jax-cuda13-plugin" if topology == "h100" else "libtpu"


def compiler(topology):
    try:
        return version(library(topology))
    except PackageNotFoundError:
        return ""
