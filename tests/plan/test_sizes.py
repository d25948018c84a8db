"""Sizes on a device are those of the arrays that lie there, at any batch; meshes are chosen that divide."""

import dataclasses

import jax
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.grammar import Method
from kvjax.mesh.on_mesh import OnMesh, as_mesh
from kvjax.mesh.rules import as_rules
from kvjax.methods.parse import parse_method
from kvjax.models.axes import left_whole
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.ops.base.memory import in_host
from kvjax.plan.layouts import abstract, layout, read_rules
from kvjax.plan.named import named
from kvjax.plan.sizes import ROOM, DeviceSizes, cache_shapes, placed_cache, tree_bytes
from kvjax.plan.topologies import topology_of
from kvjax.steps import Run

CONFIG = Config(vocab=64, d_model=32, layers=3, heads=4, kv_heads=2, head_dim=16, d_ff=64)
EIGHT, SIXTEEN = topology_of("cpu:8"), topology_of("v5e:4x4")
SENTENCES = (
    "full",
    "snapkv:window=8,budget=0.5",
    "kivi:bits=4,group=16,residual=32",
    "adakv:window=8,budget=0.5",
    "quest:budget=64",
    "offloaded",
)
CONTEXT = 320


def method(text):
    return parse_method(text)[1](None)


def on_first(tree):
    """Bytes of a tree's arrays that lie on the first device."""
    first = jax.devices()[0]
    return sum(
        s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == first
    )


@pytest.mark.rotating
@pytest.mark.parametrize(
    "text", [pytest.param(t, marks=[pytest.mark.rotating] if t != "full" else []) for t in SENTENCES]
)
def test_sizes_are_sums_over_the_shards_of_a_device(text):
    mesh = as_mesh("data=4,model=2")
    rules = as_rules("tensor", mesh.axis_names)
    model = kvjax.spread(Model(CONFIG, init(CONFIG, jax.random.key(0))), mesh, rules)
    _, held = kvjax.prefill(model, [[1] * (CONTEXT - ROOM)] * 8, method=method(text), room=ROOM)
    sizes, on = DeviceSizes(CONFIG, method(text), EIGHT, "float32"), OnMesh(mesh, rules)
    assert sizes.weights(on) == on_first(model.params)
    # A prompt is padded to a bucket; here it fills one.
    whole = held.groups, held.pools, held.next
    assert sizes.cache(held.on_mesh, 8, CONTEXT) + sizes.host(held.on_mesh, 8, CONTEXT) == on_first(whole)
    far = [x for x in jax.tree.leaves(whole) if in_host(x)]
    assert sizes.host(held.on_mesh, 8, CONTEXT) == on_first(far) and bool(far) == (text == "offloaded")


@pytest.mark.parametrize(
    "text", ["full", pytest.param("adakv:window=8,budget=0.5", marks=pytest.mark.rotating)]
)
def test_rows_scale_what_one_row_takes(text):
    on = abstract(EIGHT, {"data": 4, "model": 2}, as_rules("tensor", ("data", "model")))
    sizes = DeviceSizes(CONFIG, method(text), EIGHT, "float32")
    run = Run(CONFIG, method(text), None, on)
    for rows in (4, 12):
        direct = placed_cache(cache_shapes(run, sizes.params, rows, 256, on.mesh), on)
        assert sizes.cache(on, rows, 256) == tree_bytes(direct)


@pytest.mark.rotating
def test_the_best_mesh_splits_slots_only_where_memory_is_short():
    method = Method()
    config = dataclasses.replace(named("llama-3-70b").config, layers=3)
    sizes = DeviceSizes(config, method, SIXTEEN, "bfloat16")

    def best(memory, preset="auto"):
        size = lambda on: sizes.weights(on) + sizes.cache(on, 4, 2**17, True)  # noqa: E731
        return layout(config, method, SIXTEEN._replace(memory=memory), 4, preset, size)

    # 7.6 GiB of weights and 6 of caches: a KV head for each of 8 devices, and half of the rows for either 8.
    assert best(16 * 2**30).mesh == {"data": 2, "model": 8}
    assert best(2**30).mesh == {"data": 1, "model": 16}
    assert best(None, "single").mesh == {"data": 1}


def test_meshes_and_rules_that_do_not_go_together_are_refused():
    config = named("llama-3-70b").config
    topology = topology_of("v5p:4x4x4")

    def refused(preset="tensor", mesh=None, batch=8, changed=None, sentence="full"):
        with pytest.raises(InputError) as error:
            layout(config, method(sentence), topology, batch, preset, lambda on: 0, mesh, changed)
        return str(error.value)

    assert "unknown preset 'tensr': did you mean tensor?" in refused("tensr")
    whole = layout(config, method("full"), topology, 8, "tensor", lambda on: 0, "model=12")
    assert (
        "64 heads of layers.0.q and 159 more do not divide over mesh axis model=12"
        in left_whole(config, whole.on)[0]
    )
    assert "has 128 devices, and v5p:4x4x4 has 64" in refused(mesh="data=2,model=64")
    assert "3 rows do not divide over mesh axis data=2" in refused(mesh="data=2,model=8", batch=3)
    assert "the mesh has rows, model" in refused(mesh="rows=2,model=8", changed={"vocab": "seq"})
    assert "cannot have the slots of a list on several devices" in refused("sequence", sentence="kivi:bits=4")
    with pytest.raises(InputError, match="did you mean slots=model?"):
        read_rules(["slot=model"])
