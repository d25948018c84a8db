"""Kernels and decoders through the real CUDA compiler, ahead of time: they fit a GPU and copy no cache.

What `kvjax aot --all --topology a100,l4,h100,b200` found (scripts/aot.py) is held to the bounds of what is
compiled here.
"""

from importlib.metadata import PackageNotFoundError, version

import pytest

from kvjax.aot import gpu_reading
from kvjax.aot.cases.gpu import CASES
from kvjax.aot.hardware import GPUS
from kvjax.aot.probe import available, probe
from kvjax.base.errors import InputError
from tests.aot import record
from tests.aot.turns import by_kernel

VERSIONS, ROWS = record.read("gpu")
# Bytes that may be spilled. Exact float32 multiplies without matrix units, and at 256 lacks registers.
SPILLING = {"paged_decode-float32-h256": 640, "paged_decode-int4-h128": 32, "paged_decode-int2-h128": 32}
# Without a kernel on a GPU: attention over latents, and states, which XLA writes in place at a step's end and
# keeps what goes into them until then.
XLA = {"decoder-full-mla", "decoder-delta", "decoder-levels"}
needs_compiler = pytest.mark.skipif(bool(available("gpu")), reason=available("gpu"))


def assert_fits(name, found):
    assert found["copies"] == 0
    # Results as long as the cache come as logits of every query first, and parts of lists are merged.
    if name.startswith("decoder-"):
        least = 0.12 * found["cache"] if name in XLA else 24 * 2**20
        assert found["temporaries"] < max(0.01 * found["cache"], least)
        assert found["aliases"] == found["cache"]
    if name not in XLA:
        assert found["kernels"] >= 1 and found["resident"] != 0
        assert (found["spills"] or 0) <= SPILLING.get(name, 0)


@needs_compiler
@pytest.mark.parametrize(("name", "gpu"), by_kernel(CASES, list(GPUS)))
def test_it_compiles_for_a_gpu_and_fits(name, gpu):
    found = probe(gpu, name)
    assert "error" not in found, found
    assert_fits(name, found)
    try:
        same = version("jax-cuda13-plugin") == VERSIONS["jax-cuda13-plugin"]
    except PackageNotFoundError:
        same = False
    if same:
        recorded = ROWS[name, gpu]
        for figure in ("temporaries", "registers", "shared"):
            assert (found[figure] or 0) <= 1.05 * (recorded[figure] or 0), figure


def test_the_record_is_whole_and_all_of_it_fits():
    assert set(ROWS) == {(name, gpu) for name in CASES for gpu in GPUS}
    for (name, _), row in ROWS.items():
        assert_fits(name, row)
        assert (row["resident"] is None) == (name in XLA)


def test_every_operation_and_every_gpu_is_compiled_every_time():
    always = [case.values for case in by_kernel(CASES, list(GPUS)) if not case.marks]
    assert {name.split("-")[0] for name, _ in always} == {name.split("-")[0] for name in CASES}
    assert {gpu for _, gpu in always} == set(GPUS)


def test_unknown_cases_are_refused_by_the_gpu_that_has_none():
    with pytest.raises(InputError, match="unknown case 'flash_prefill-128k' for h100"):
        probe("h100", "flash_prefill-128k")


def test_what_a_kernel_takes_is_read_from_the_dumps(tmp_path, monkeypatch):
    """Of two kernels the worst of each figure, and nothing of XLA's own."""
    line = "kCustomKernel [prev=002 (1)] {} grid: [8, {}, 1] threads: [128, 1, 1]  shared_memory: {} bytes\n"
    text = (
        line.format("a_decode", 64, 30000) + line.format("b_decode", 2, 50000) + line.format("fused", 9, 99)
    )
    (tmp_path / "module.thunk_sequence.txt").write_text(text)
    for name, registers in (("a_decode", 72), ("b_decode", 168), ("fused", 255)):
        (tmp_path / f"{name}.ptx").write_text(f".target sm_90a\n.visible .entry {name}(\n// {registers}")
    told = {"a_decode": (72, 0), "b_decode": (168, 12), "fused": (255, 999)}
    monkeypatch.setattr(gpu_reading, "_assembled", lambda path, gpu: told[path.stem])
    found = gpu_reading.programs(str(tmp_path), "_decode", GPUS["h100"])
    assert found == {"registers": 168, "spills": 12, "shared": 50000, "resident": 3, "waves": 1.29}
    assert set(gpu_reading.programs(str(tmp_path), "other", GPUS["h100"]).values()) == {None}


def test_a_gpu_is_described_as_the_compiler_wants_it():
    text = gpu_reading.target(GPUS["l4"])
    assert "cuda_compute_capability { major: 8 minor: 9 }" in text and "core_count: 58" in text
