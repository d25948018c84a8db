"""Kernels in every payload at every head dimension compile; `kvjax aot --case '*-compiles'` is the whole."""

from pathlib import Path

import jax
import pytest

from kvjax import pallas_kernels
from kvjax.aot.cases import CASES, shapes
from kvjax.aot.hardware import DEVICES, TOPOLOGIES
from kvjax.aot.probe import available, probe
from kvjax.ops.decode.page_pool import BITS

PAIRS = [(name, TOPOLOGIES[i % len(TOPOLOGIES)]) for i, name in enumerate(shapes.CASES)]


@pytest.mark.skipif(bool(available()), reason=available())
@pytest.mark.rotating
@pytest.mark.parametrize(("name", "topology"), PAIRS)
def test_a_kernel_compiles_at_every_head_dimension(name, topology):
    found = probe(topology, name)
    assert "error" not in found, found
    # Something of the kernel was found in the compiler's dump: it was no plain form that compiled.
    assert found["bundles"]


def test_every_kernel_has_a_program_and_every_payload():
    folder = Path(pallas_kernels.__path__[0])
    kernels = {path.parent.name for path in folder.glob("*/*_tpu.py")}
    assert kernels == {name.split("-")[0] for name in shapes.KERNELS}
    assert {shapes.PAYLOADS[n][0] for n in shapes.KERNELS["paged_decode"].payloads} == set(BITS)
    assert set(shapes.CASES) <= set(CASES) and all(n.endswith("-compiles") for n in shapes.CASES)


# Programs of other sizes than head dimensions, or of rows padded to whole lanes.
OTHERS = {"append", "append-pages", "mla_decode", "gated_delta-step", "paged_decode-small"}


@pytest.mark.parametrize("operation", sorted(set(shapes.KERNELS) - OTHERS))
def test_an_operation_is_called_at_every_head_dimension_in_every_payload(operation):
    for payload in shapes.KERNELS[operation].payloads:
        cases = [
            make(DEVICES["v5e"])
            for n, make in shapes.CASES.items()
            if n.startswith(f"{operation}-{payload}-")
        ]
        widths = {jax.tree.leaves(given)[0].shape[-1] for case in cases for given in case.operands}
        # Codes of other rows are refused.
        only = {"grouped_decode": {128, 256}, "stacked_decode-picked": {128, 256}}
        assert widths == only.get(operation, {64, 80, 96, 128, 192, 256})
