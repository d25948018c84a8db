"""Decoders split over many devices, through the compilers for TPUs and GPUs: no second cache is made.

Llama 3 70B as it is, with all of its layers: on a TPU they are stacked, so depth costs no time.
"""

import dataclasses

import pytest

from kvjax.aot.probe import available
from kvjax.plan.named import named
from kvjax.plan.planning import Planner, PlanRequest
from kvjax.plan.topologies import topology_of
from tests.sweep import sweep

needs_tpu = pytest.mark.skipif(bool(available("tpu")), reason=available("tpu"))
needs_gpu = pytest.mark.skipif(bool(available("gpu")), reason=available("gpu"))


def planned(model, topology, context, batch, layers=None, method="full"):
    config = named(model).config
    config = config if layers is None else dataclasses.replace(config, layers=layers)
    return Planner(PlanRequest(model, config, topology_of(topology), context, batch, method, chunk=0))


@needs_tpu
def test_a_step_of_70b_over_a_million_tokens_fits_64_devices_and_copies_no_cache():
    planner = planned("llama-3.1-70b", "v5p:4x4x4", 2**20, 8)
    step = planner.judged(8, 2**20, 0)
    assert step["fits"] and planner.layout.mesh == {"data": 8, "model": 8}
    assert step["aliases"] >= step["cache"] and step["temporaries"] < 0.01 * step["cache"]
    # After attention and feed-forward of every layer a row of 8192 channels, and a few numbers once.
    [[kind, count, size]] = step["collectives"]
    assert kind == "all-reduce" and 160 <= count <= 170 and size == pytest.approx(160 * 8192 * 2, rel=0.05)
    assert step["roofline"]["hbm"] == pytest.approx((step["weights"] + step["cache"]) / 2765e6, rel=0.05)


@needs_tpu
@pytest.mark.parametrize(
    "method", sweep(("full", "h2o:budget=0.25", "adakv:budget=0.25", "quest:budget=0.25"), "full")
)
def test_kernels_of_tpus_run_on_a_mesh(method):
    planner = planned("llama-3.1-8b", "v5e:4x4", 2**15, 16, layers=4, method=method)
    assert planner.judged(16, 2**15, 0)["kernels"] > 0


@needs_gpu
@pytest.mark.parametrize("method", sweep(("full", "kivi:bits=4"), "full"))
def test_kernels_of_gpus_run_on_a_mesh(method):
    planner = planned("llama-3.1-8b", "h100:8", 2**15, 8, layers=4, method=method)
    assert planner.judged(8, 2**15, 0)["kernels"] > 0


# On TPUs XLA brings the bounds of pages to the fast memory, and counts what comes back among temporaries.
@pytest.mark.rotating
@pytest.mark.parametrize(
    "method, topology",
    [
        pytest.param("kivi:bits=4", "v5p:2x2x2", marks=needs_tpu),
        pytest.param("kivi:bits=4", "h100:8", marks=needs_gpu),
        pytest.param("quest:budget=0.25", "h100:8", marks=needs_gpu),
    ],
)
def test_full_tails_move_on_every_device_without_a_second_layer(method, topology):
    step = planned("llama-3.1-8b", topology, 2**17, 8, layers=4, method=method).judged(8, 2**17, 0)
    assert step["aliases"] >= step["cache"] and step["temporaries"] < 0.01 * step["cache"]


@needs_tpu
def test_what_is_too_large_is_told_with_what_it_would_need():
    step = planned("llama-3.1-70b", "v5e:4x4", 2**17, 256, layers=4).judged(256, 2**17, 0)
    assert step["too_large"] and step["fits"] is False
    assert step["needs"] >= step["weights"] + step["cache"] > 15.75 * 2**30


@needs_gpu
@pytest.mark.rotating
def test_a_step_is_compiled_for_eight_gpus():
    step = planned("llama-3.1-8b", "h100:8", 2**17, 8, layers=4).judged(8, 2**17, 0)
    assert step["fits"] and step["temporaries"] < 0.05 * step["cache"]
    assert [kind for kind, *_ in step["collectives"]] == ["all-reduce"]
