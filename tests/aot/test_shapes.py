"""Kernels in every payload at every head dimension compile; `kvjax aot --case '*-compiles'` is the whole."""

from pathlib import Path

import jax
import pytest

from kvjax import pallas_kernels
from kvjax.aot.cases import CASES, shapes
from kvjax.aot.hardware import DEVICES, TOPOLOGIES
from kvjax.aot.probe import available, probe
from kvjax.ops.page_pool import BITS

PAIRS = [(name, TOPOLOGIES[i % len(TOPOLOGIES)]) for i, name in enumerate(shapes.CASES)]


@pytest.mark.skipif(bool(available()), reason=available())
@pytest.mark.parametrize(("name", "topology"), PAIRS, ids=lambda x: x)
def test_a_kernel_compiles_at_every_head_dimension(name, topology):
    found = probe(topology, name)
    assert "error" not in found, found
    # Something of the kernel was found in the compiler's dump: it was no plain form that compiled.
    assert found["bundles"] and found["vmem"] > 0


def test_every_kernel_has_a_program_and_every_payload():
    folder = Path(pallas_kernels.__path__[0])
    kernels = {path.parent.name for path in folder.glob("*/*_tpu.py")}
    assert kernels == {name.split("-")[0] for name in shapes.KERNELS}
    assert {shapes.PAYLOADS[n][0] for n in shapes.KERNELS["paged_decode"][1]} == set(BITS)
    assert set(shapes.CASES) <= set(CASES) and all(n.endswith("-compiles") for n in shapes.CASES)


@pytest.mark.parametrize(
    "name", [n for n in shapes.CASES if not n.startswith(("append", "mla", "gated_delta-s"))]
)
def test_a_program_calls_its_kernel_at_every_head_dimension(name):
    case = CASES[name](DEVICES["v5e"])
    widths = {jax.tree.leaves(operands)[0].shape[-1] for operands in case.operands}
    assert widths == {64, 80, 96, 128, 192, 256}
