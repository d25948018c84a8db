"""Kernels through the real TPU compiler, ahead of time: they compile, copy no cache and keep their schedules.

The baseline is what `kvjax aot --all` found (scripts/aot.py). Every row of it is held to the bounds of what
is compiled here; schedules are compared with the same compiler only. jax's own kernels are recorded to stand
beside ours, and held to nothing.
"""

import json
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from kvjax.aot import probe as module
from kvjax.aot import reading
from kvjax.aot.cases import CASES, bundled, shapes
from kvjax.aot.hardware import TOPOLOGIES, device_of
from kvjax.aot.probe import available, probe
from kvjax.base.errors import InputError
from tests.aot import record
from tests.aot.turns import by_kernel

ROOT = Path(__file__).parents[2]
VERSIONS, ROWS = record.read("baseline")
# Small shapes, which only have to compile, are in test_shapes.py.
LARGE = [name for name in CASES if name not in shapes.CASES | bundled.CASES]
# Their result is their donated cache.
IN_PLACE = [n for n in LARGE if n.startswith("paged_append") or n.endswith(("-step", "-generation"))]
MIB = 2**20
needs_compiler = pytest.mark.skipif(bool(available()), reason=available())


def compiler():
    try:
        return version("libtpu")
    except PackageNotFoundError:
        return ""


def assert_fits(name, found):
    """Check that caches stay in place in HBM; without one, a kernel may take half the least VMEM, 64 MiB."""
    assert name not in IN_PLACE or found["aliases"] == found["cache"]
    assert found["copies"] == 0 and not found["staged"]
    if found["cache"]:
        assert found["temporaries"] < 0.01 * found["cache"] + found["relaid"]
    assert found["vmem"] < (16 if found["cache"] else 32) * MIB


@needs_compiler
@pytest.mark.parametrize(("name", "topology"), by_kernel(LARGE, TOPOLOGIES))
def test_a_kernel_compiles_copies_no_cache_and_keeps_its_schedule(name, topology):
    found = probe(topology, name)
    assert "error" not in found, found
    assert_fits(name, found)
    if compiler() == VERSIONS["libtpu"]:
        for figure in ("spills", "temporaries", "bundles_us"):
            assert found[figure] <= ROWS[name, topology][figure] * 1.05, figure


@needs_compiler
def test_what_does_not_compile_is_an_error_and_no_crash(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.01)
    assert probe("v5e:2x2", next(iter(CASES))) == {"error": "not compiled within 0.01 s"}


@needs_compiler
def test_the_compiler_leaves_no_logs_behind_and_what_it_aborts_with_is_still_told(monkeypatch, tmp_path):
    logs, scratch = tmp_path / "logs", tmp_path / "scratch"
    for folder in (logs, scratch):
        folder.mkdir()
    monkeypatch.setenv("TPU_LOG_DIR", str(logs))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    # The simulation aborts on copies by hand.
    found = module._child("kvjax.aot.child", "v5e:2x2", "stacked_decode-bfloat16-h64", "profile")
    assert "Static LLO profiling" in found["error"]
    assert list(logs.iterdir()) == list(scratch.iterdir()) == []


def test_the_baseline_is_whole_and_of_cases_that_exist():
    assert set(ROWS) == {
        (name, topology) for name in set(CASES) - set(shapes.CASES) for topology in TOPOLOGIES
    }


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_what_is_recorded_of_ours_fits(topology):
    for name in LARGE:
        assert_fits(name, ROWS[name, topology])


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_paged_decoding_waits_for_memory_alone_and_appending_is_short(topology):
    def time(name):
        return ROWS[name, topology]["bound_us"]

    whole = "paged_decode-bfloat16-h128"
    for name in (whole, "paged_decode-int8-h128"):
        assert ROWS[name, topology]["bound"] == "hbm"
    assert time(f"{whole}-mass") <= 1.1 * time(whole)
    if not topology.startswith("v5p"):
        assert time(whole) >= 1.8 * time("paged_decode-int8-h128")
        assert time(whole) >= 3 * time("paged_decode-int4-h128")
    for payload in ("bfloat16", "int8"):
        assert time(f"paged_append-{payload}-alone") <= 5


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_paged_decoding_is_ahead_of_jaxs_own_kernels(topology):
    ours = ROWS["paged_decode-bfloat16-h128", topology]
    for name in ("jax_paged_attention", "jax_ragged_paged_attention"):
        theirs = ROWS[f"{name}-bfloat16-h128", topology]
        assert ours["bundles_us"] < 0.7 * theirs["bundles_us"]
        # Where memory bounds both, tables of heads are a little more to read than those of sequences.
        assert ours["bound_us"] <= 1.001 * theirs["bound_us"]


def test_every_operation_and_every_topology_is_compiled_every_time():
    always = [case.values for case in by_kernel(LARGE, TOPOLOGIES) if not case.marks]
    assert {name.split("-")[0] for name, _ in always} == {name.split("-")[0] for name in LARGE}
    assert {topology for _, topology in always} == set(TOPOLOGIES)
    assert {"stacked_decode-step", "stacked_decode-generation", "mla_decode-bfloat16-step"} <= set(IN_PLACE)


def test_only_these_have_no_cache():
    bare = {name.split("-")[0] for name in LARGE if ROWS[name, TOPOLOGIES[0]]["cache"] == 0}
    assert bare == {"flash_prefill", "attention_stats", "gated_delta", "sparse_prompt"}


def test_unknown_names_are_refused():
    with pytest.raises(InputError, match="unknown case 'none'"):
        probe("v5e:2x2", "none")
    for name in ("v9x:2x2", "v5e"):
        with pytest.raises(ValueError, match="expected a generation and a shape"):
            device_of(name)


def test_a_relayout_of_the_cache_is_counted_and_a_small_copy_is_not():
    text = """
      %copy.3 = bf16[32,256,2,128]{3,2,1,0:T(8,128)(2,1)} copy(%p0)
      %copy.4 = s4[64]{0} copy(%p1)
      %x = f32[8]{0:S(1)} copy-done(%y)
      %big = bf16[1024,128]{1,0:T(8,128)S(1)} fusion(%z)
      %k = f32[8]{0} custom-call(%x, %big), custom_call_target="tpu_custom_call"
    """
    assert reading.large_copies(text, 2**20) == 1 and reading.large_copies(text, 1) == 2
    assert reading.staged(text, 2**16) == ["big"] and reading.staged(text, 2**30) == []


def test_other_tiles_of_the_same_memory_are_no_copy():
    text = """
%view (input: bf16[1024,128]) -> bf16[1024,128] {
  %input = bf16[1024,128]{1,0:T(16,128)(2,1)} parameter(0)
  ROOT %copy.1 = bf16[1024,128]{1,0:T(8,128)(2,1)} copy(%input)
}

%other (p: bf16[1024,128]) -> bf16[1024,128] {
  ROOT %copy.2 = bf16[1024,128]{0,1} copy(%p)
}
  %a = bf16[1024,128] fusion(%x), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%view
  %b = bf16[1024,128] fusion(%x), kind=kLoop, calls=%other
"""
    assert reading.large_copies(text, 2**10) == 1
    assert reading.large_copies(text.replace("output_to_operand_aliasing", "x"), 2**10) == 2


def test_conditional_parts_are_measured_where_nothing_is_conditional_within_them():
    text = """
     0   :  { sbr.rel (%p0) target = $region9 }
  0x1 LB: > { sbr.rel (%p1) target = $region4 }
  0x4   : > { sbr.rel (!%p2) target = $region3 }
  0x9 PF: > { %a = smov 0 } /* Start region 3 */
  0x20 PF: > { %b = smov 0 } /* Start/End empty region 4 :: Start region 5 */
  0x21   : > { sbr.rel (%p3) target = $region6 }
  0x40   : > { %c = smov 0 } /* Start region 6 */
  0x50   :  {} /* Start region 9 */
    """
    assert reading.branches(text) == [5, 31] and reading.largest([5, 31, 8], 2) == [31, 8]


def test_vmem_of_a_kernel_is_what_it_allocates_and_not_what_xla_holds_below(tmp_path):
    def operation(*sizes):
        below = 2**24
        allocations = [{"size": n, "tag": "scratch operand"} for n in sizes]
        block = {"block_size": below + sum(sizes), "allocations": allocations}
        return {"total_size": below + sum(sizes), "blocks": [block]}

    operations = {"kernel.1": operation(4096, 512), "kernel.2": operation(4096), "fusion": operation()}
    report = json.dumps({"hlo_breakdowns": operations})
    (tmp_path / "1-vmem_report.html").write_text(f"<script>const DATA = {report};</script>")
    assert reading.schedule(str(tmp_path), "kernel")["vmem"] == 4608


def test_reports_join_the_record_of_their_compiler(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import aot

    before = (record.FOLDER / "baseline.json").read_bytes()
    (tmp_path / "baseline.json").write_bytes(before)
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    name, topology = next(iter(ROWS))
    row = ROWS[name, topology] | {"case": name, "topology": topology, "staged": [], "arguments": 1}
    small = {"case": next(iter(shapes.CASES)), "topology": topology}
    aot.put({**VERSIONS, "cases": [row, small]})
    assert (tmp_path / "baseline.json").read_bytes() == before
    aot.put({**VERSIONS, "cases": [row | {"spills": 99}]})
    changed = record.read("baseline").rows
    assert changed.pop((name, topology))["spills"] == 99
    assert changed == {key: row for key, row in ROWS.items() if key != (name, topology)}
    with pytest.raises(SystemExit, match="the report of .*'libtpu': '9'"):
        aot.put({**VERSIONS, "libtpu": "9", "cases": [row]})
    with pytest.raises(SystemExit, match="too large"):
        aot.put({**VERSIONS, "cases": [{"case": name, "topology": topology, "error": "too large"}]})


def test_the_page_of_kernels_shows_the_record(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import aot

    assert (
        f"<!-- summary -->\n{aot.summary()}\n<!-- end of summary -->"
        in (ROOT / "docs/kernels.md").read_text()
    )
