"""Slots per step: how they are chosen, that the table names what exists, and that the wrappers read it."""

import json
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from kvjax.aot import tune
from kvjax.aot.cases import CASES
from kvjax.aot.hardware import DEVICES
from kvjax.base.errors import InputError
from kvjax.ops.decode import grouped_decode, mla_decode, paged_decode, stacked_decode
from kvjax.ops.decode.page_pool import PagePool, page_rows
from kvjax.pallas_kernels import block_sizes

ROW = dict(slots=1024, us=100.0, vmem=2**21, spills=0.0)
V6E = "TPU v6 lite"


def compiled_for(kind):
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


def test_the_fastest_is_picked_and_of_equals_the_one_of_the_least_memory():
    slower, equal = ROW | dict(slots=512, us=110.0, vmem=2**20), ROW | dict(slots=2048, us=96.0, vmem=2**22)
    assert tune.pick([slower, ROW, equal]) == ROW
    assert tune.pick([slower, ROW, equal | dict(us=94.0)])["slots"] == 2048
    assert tune.pick([ROW | dict(slots=2048), ROW])["slots"] == 1024


def test_what_spills_takes_too_much_memory_or_does_not_compile_is_never_picked():
    fast = ROW | dict(slots=4096, us=1.0)
    for bad in (dict(spills=tune.SPILLS * 1.01), dict(vmem=tune.VMEM + 1), dict(error="no")):
        assert tune.pick([ROW, fast | bad]) == ROW
        assert tune.pick([fast | bad]) is None and tune.pick([]) is None
    assert tune.pick([fast | dict(vmem=tune.VMEM + 1)], vmem=2 * tune.VMEM) is not None


def test_small_steps_wait_for_their_copies():
    # Bound by memory, by issue, and by neither: steps of 1 us of work and 1 us of copying.
    assert tune.bound_us(10.0, 500.0, 100.0) == 500.0 and tune.bound_us(500.0, 10.0, 100.0) == 500.0
    assert tune.bound_us(100.0, 100.0, 100.0) == pytest.approx(100 * (1 + tune.LATENCY_US / 2))


@pytest.fixture
def compiler(monkeypatch):
    """Make a probe that makes figures up, and dies at its fourth call."""
    calls = []

    def probe(topology, name, **options):
        calls.append((topology, name, options))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return dict(bundles_us=10.0, hbm_us=20.0, spills=0, bundles={"1": 10}, vmem=sum(options.values()))

    monkeypatch.setattr(tune, "probe", probe)
    monkeypatch.setattr(tune, "version", lambda _: "1")
    return calls


def test_a_sweep_that_was_killed_goes_on_where_it_was(compiler, tmp_path):
    todo, kept = tune.jobs(["mla_decode"], ["v5e:2x2", "v6e:2x2"]), tmp_path / "sweep.json"
    with pytest.raises(KeyboardInterrupt):
        list(tune.measure(todo, kept))
    assert len(json.loads(kept.read_text())) == 3
    found = list(tune.measure(todo, kept))
    assert len(compiler) == len(todo) + 1
    assert [{n: row[n] for n in todo[0]} for row in found] == todo
    newer = [row | dict(libtpu="2") for row in todo]
    assert len(list(tune.measure(newer, kept))) == len(todo) and len(compiler) == 2 * len(todo) + 1


def test_a_table_keeps_what_was_not_swept(tmp_path):
    def found(operation, topology, **row):
        return (
            ROW
            | dict(operation=operation, topology=topology, payload="bfloat16", width=128, libtpu="1")
            | row
        )

    path = tmp_path / "block_sizes.json"
    tune.write_table([found("stacked_decode", "v5e:2x2"), found("stacked_decode", "v6e:2x2")], path)
    # The second sweep has nothing that fits.
    tune.write_table([found("stacked_decode", "v5e:2x2", error="no"), found("mla_decode", "v6e:2x2")], path)
    rows = [(r["operation"], r["generation"], r["slots"]) for r in json.loads(path.read_text())["rows"]]
    assert rows == [("mla_decode", "v6e", 1024), ("stacked_decode", "v6e", 1024)]


def test_every_committed_row_is_of_an_operation_a_generation_and_a_candidate_that_exist():
    rows = json.loads(block_sizes.TABLE.read_text())["rows"]
    assert rows and len(block_sizes.tuned_sizes()) == len(rows)
    for row in rows:
        sweep = tune.SWEEPS[row["operation"]]
        assert row["generation"] in DEVICES and row["slots"] in sweep.candidates, row
        assert sweep.cases[row["payload"], row["width"]] in CASES and row["vmem"] <= sweep.vmem, row
    assert set(block_sizes.GENERATIONS.values()) == set(DEVICES)
    assert all(device.generation == name for name, device in DEVICES.items())


def test_every_swept_case_takes_the_step_it_is_given():
    for sweep in tune.SWEEPS.values():
        for name in sweep.cases.values():
            trips = [
                CASES[name](DEVICES["v5e"], **{sweep.option: slots}).trips["2"] for slots in (1024, 2048)
            ]
            assert trips[0] == 2 * trips[1]


def test_the_wrappers_take_what_the_table_says_of_the_device_that_is_compiled_for(monkeypatch):
    # 640 and 384 are nobody's rule.
    made_up = {
        ("stacked_decode", "v6e", "bfloat16", 128): 640,
        ("stacked_decode", "v6e", "bfloat16", 64): 384,
        ("grouped_decode", "v6e", "uint2", 128): 640,
        ("paged_decode", "v6e", "int8", 128): 640,
        ("mla_decode", "v6e", "bfloat16", 640): 640,
    }
    monkeypatch.setattr(block_sizes, "tuned_sizes", lambda: made_up)
    rows = jax.ShapeDtypeStruct((1, 1, 1, 8192, 128), jnp.bfloat16)
    words = jax.ShapeDtypeStruct((1, 9, page_rows("int8", 128, 128), 128), jnp.int32)
    latents = jax.ShapeDtypeStruct((1, 9, 128, 640), jnp.bfloat16)

    def taken():
        pool = PagePool(words, 128, "int8")
        return (
            stacked_decode.slots_per_step(rows, rows), stacked_decode.slots_per_step(rows),
            grouped_decode.slots_per_step(2, 128),
            paged_decode.pages_per_step(pool), mla_decode.pages_per_step(latents),
        )  # fmt: skip

    with compiled_for(V6E):
        assert taken() == (640, 384, 640, 5, 5)
    rule = (2048, 4096, 2048, 32, 16)
    for kind in ("TPU v5 lite", "TPU v99"):
        with compiled_for(kind):
            assert taken() == rule
    assert taken() == rule


def test_the_kernel_gets_the_steps_of_the_table(monkeypatch):
    monkeypatch.setattr(block_sizes, "tuned_sizes", lambda: {("stacked_decode", "v6e", "bfloat16", 128): 640})
    given = []

    def kernel(*operands, sizes, **how):
        given.append(sizes.block)
        raise KeyboardInterrupt

    monkeypatch.setattr(
        stacked_decode, "tpu", SimpleNamespace(**vars(stacked_decode.tpu) | {"stacked_decode": kernel})
    )
    q, k = jnp.zeros((1, 1, 1, 128), jnp.bfloat16), jnp.zeros((1, 1, 1, 4096, 128), jnp.bfloat16)
    operands = (q, k, k, jnp.asarray([9]), jnp.asarray([[8]]))
    for context in (compiled_for(V6E), compiled_for("TPU v99")):
        with context, pytest.raises(KeyboardInterrupt):
            # Traced: nothing can run on the device of an abstract mesh.
            jax.eval_shape(
                partial(stacked_decode.stacked_decode, scale=1.0, implementation="tpu"),
                *operands,
            )  # fmt: skip
    assert given == [640, 2048]


def test_lists_are_split_over_both_cores_of_a_device_that_has_two():
    for kind, lists, cores in (("TPU v5", 32, 2), ("TPU v5", 3, 1), ("TPU v5 lite", 32, 1)):
        with compiled_for(kind):
            assert block_sizes.cores_for(lists) == cores


def test_operations_without_a_sweep_are_refused():
    with pytest.raises(InputError, match="nothing to tune in 'none': expected stacked_decode"):
        tune.jobs(["none"], ["v5e:2x2"])
