"""Whole caches in host memory: layers come to the device one by one, and no number changes."""

import dataclasses
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.api.prefill import bare_cache
from kvjax.compress import segments
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init, plan
from kvjax.ops.base import memory
from kvjax.place import by_layer
from kvjax.place.host import Host
from kvjax.plan.collectives import collectives
from kvjax.pure import decoding
from kvjax.state.cache import Slots, host_nbytes, lies_far, nbytes
from tests.models import conversation
from tests.sweep import sweep

needs_host = pytest.mark.skipif(not memory.offers_host(), reason="the backend offers programs no host memory")
LAYERS, VOCAB, GRANULE = 2, 32, 8
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]
SENTENCES = {
    "full": (kvjax.method("full"),),
    "int8": (kvjax.method("int8"),),
    "kivi": (kvjax.method("kivi", bits=4, group=GRANULE, residual=GRANULE),),
    "snapkv + int8": (kvjax.method("snapkv", budget=0.5, window=1), kvjax.method("int8")),
    "keydiff + renumbered": (kvjax.method("keydiff", budget=0.5), kvjax.method("renumbered")),
}
FAR = kvjax.method("offloaded")


@cache
def small(stacked=False):
    config = Config(vocab=VOCAB, d_model=16, layers=LAYERS, heads=4, kv_heads=2, head_dim=8, d_ff=16)
    return Model(config, init(config, jax.random.key(5), groups=plan(config, stacked=stacked)))


def talked(method, model=None, steps=2):
    """Logits of a prompt, of steps, of a second prompt and of a step behind it, and the cache then."""
    model = small() if model is None else model
    logits, cache = kvjax.prefill(model, PROMPTS, method=method, room=2 * GRANULE + 12)
    found, tokens = [logits], np.random.default_rng(3).integers(0, VOCAB, (steps, 2))
    for token in tokens:
        logits, cache = kvjax.step(model, cache, token)
        found.append(logits)
    logits, cache = kvjax.prefill(model, [[1, 2], [3]], cache=cache, room=4)
    last, cache = kvjax.step(model, cache, tokens[0])
    return [*found, logits, last], cache


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def both():
    return talked(kvjax.method("full")), talked(FAR)


def parts_of(cache):
    return [part for group in cache.groups for part in (*group.bodies, group.tail) if part.far]


@pytest.mark.rotating
def test_every_number_is_that_of_the_same_method_on_the_device(both):
    (want, near), (got, far) = both
    assert_equal(want, got)
    for a, b in zip(near.groups, far.groups, strict=True):
        assert_equal((a.tail.k, a.tail.v, a.tail.pos), (b.tail.k, b.tail.v, b.tail.pos))


FREE = {
    "h2o": ("h2o",),
    "tova + int8": ("tova", "int8"),
    "streamingllm": ("streamingllm",),
    "r-kv + int8": ("r-kv", "int8"),
    "h2o + intactkv": ("h2o", "intactkv(group=4)"),
    # These also merge slots while decoding, after every token or after several.
    "d2o": ("d2o",),
    "compressive-transformer": ("compressive-transformer",),
    "keepkv + int8": ("keepkv", "int8"),
}


# R-KV evicts after several tokens, and looks at keys.
MORE = {"r-kv": dict(buffer=2, window=1), "d2o": dict(sinks=0), "streamingllm": dict(sinks=0)}


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(FREE, "d2o"))
def test_what_changes_slots_while_decoding_changes_them_in_host_memory(name):
    keep, *store = FREE[name]
    more = MORE.get(keep, {})
    parts = [kvjax.method(keep, budget=0.5, **more), *map(kvjax.method, store)]
    (want, near), (got, far) = talked(kvjax.chain(*parts), steps=6), talked(kvjax.chain(*parts, FAR), steps=6)
    assert_equal(want, got)
    for a, b in zip(near.groups, far.groups, strict=True):
        assert_equal(a.tail.pos, b.tail.pos)
    assert parts_of(far) and (host_nbytes(far) > 0) == memory.offers_host()


@pytest.mark.rotating
def test_what_gpus_cannot_change_in_host_memory_is_refused(monkeypatch):
    monkeypatch.setattr(segments, "platform", lambda: "gpu")
    merging = kvjax.chain(kvjax.method("compressive-transformer", budget=4, rate=2), FAR)
    with pytest.raises(NotImplementedError, match="use a keep that only evicts, such as h2o"):
        kvjax.prefill(small(), [[1, 2, 3, 4, 5, 6, 7]], method=merging, room=2)


@pytest.mark.rotating
@needs_host
def test_keys_and_values_lie_in_host_memory_and_all_else_on_the_device(both):
    cache = both[1][1]
    far = [jax.tree_util.keystr(p) for p, x in jax.tree.leaves_with_path(cache) if memory.in_host(x)]
    assert len(far) == 2 * LAYERS and all(re.search(r"\.tail\.[kv]$", name) for name in far)
    assert jax.tree.leaves(lies_far(cache)) == [memory.in_host(x) for x in jax.tree.leaves(cache)]
    # All but positions, four bytes beside two rows of eight in float32.
    assert host_nbytes(cache) == pytest.approx(nbytes(cache) * 64 / 68, rel=0.01)


@needs_host
def test_a_step_brings_every_layer_once_and_sends_back_the_block_of_the_token(both):
    cache = both[1][1]
    bare, run = bare_cache(cache), decoding(small(), FAR, None)
    traced = steps.step.trace(run, small().params, bare, jnp.zeros(2, jnp.int32), jnp.ones(2, bool))
    moves = list(moved(traced.jaxpr.jaxpr))
    slots = parts_of(cache)[0].capacity
    assert sorted(set(moves)) == sorted(
        {("to device", (1, 2, 2, slots, 8)), ("to host", (1, block(slots), 8))}
    )
    assert [way for way, _ in moves].count("to device") == 2 * LAYERS
    compiled = traced.lower().compile()
    assert compiled.memory_analysis().alias_size_in_bytes == nbytes(bare)


def block(slots):
    return int(np.gcd(by_layer.BLOCK, slots))


def moved(jaxpr):
    """(which way, shape) of all arrays that a program moves between the memories."""
    for one in jaxpr.eqns:
        if one.primitive.name == "device_put":
            for old, new in zip(one.invars, one.outvars, strict=True):
                if old.aval.memory_space != new.aval.memory_space:
                    way = "to host" if new.aval.memory_space == memory.HOST else "to device"
                    yield way, new.aval.shape
        for inner in jax.tree.leaves(list(one.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from moved(inner)


@pytest.mark.rotating
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", [*SENTENCES])
def test_every_class_of_store_answers_as_on_the_device(name, stacked):
    near, far = (kvjax.chain(*SENTENCES[name], *host) for host in ((), (FAR,)))
    (want, _), (got, cache) = (talked(one, small(stacked), GRANULE + 2) for one in (near, far))
    assert_equal(want, got)
    assert (host_nbytes(cache) > 0) == memory.offers_host()


def stepped(cache):
    return kvjax.step(small(), kvjax.fork(cache, 1), np.arange(cache.next.shape[0]))[0]


CHANGES = {
    "rows taken": lambda c: kvjax.take_rows(c, [1, 1, 0]),
    "rows emptied": lambda c: kvjax.reset_rows(c, [True, False]),
    "copied": lambda c: kvjax.fork(c, 2),
    "taken back": lambda c: kvjax.rollback(kvjax.fork(c, 1), 1),
}


@pytest.mark.parametrize("change", sweep(CHANGES, "taken back"))
def test_a_changed_cache_goes_on_as_on_the_device_and_stays_where_it_lies(both, change):
    near, far = (CHANGES[change](cache) for _, cache in both)
    assert_equal(stepped(near), stepped(far))
    assert (host_nbytes(far) > 0) == memory.offers_host()
    assert all(memory.in_host(part.k) == memory.offers_host() for part in parts_of(far))


@pytest.mark.rotating
def test_a_saved_cache_lies_in_host_memory_again(both, tmp_path):
    cache = both[1][1]
    kvjax.save_cache(tmp_path / "a.cache", cache)
    loaded = kvjax.load_cache(tmp_path / "a.cache")
    assert host_nbytes(loaded) == host_nbytes(cache)
    assert all(memory.in_host(part.k) == memory.offers_host() for part in parts_of(loaded))
    assert_equal(stepped(loaded), stepped(cache))


@pytest.mark.rotating
def test_prompts_in_chunks_beams_and_texts_are_those_of_the_device():
    found = []
    for method in (kvjax.method("full"), FAR):
        chunks, _ = kvjax.prefill(small(), PROMPTS, method=method, room=8, chunk=4)
        beams = kvjax.generate(small(), PROMPTS, method=method, max_new_tokens=4, beams=2)
        text = kvjax.generate(small(), PROMPTS, method=method, max_new_tokens=4)
        found.append(((chunks, beams.tokens, text.tokens), beams.logprobs))
    (near, near_logprobs), (far, far_logprobs) = found
    assert_equal(near, far)
    # A search compiles its softmax together with its step, so other steps may round its logarithms otherwise.
    np.testing.assert_allclose(near_logprobs, far_logprobs, rtol=1e-6)


MESHES = [("data=2,model=2", "tensor"), ("data=2", "batch")]


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["full", "int8", "kivi"])
@pytest.mark.parametrize(("mesh", "rules"), MESHES)
def test_on_a_mesh_every_device_has_its_part_in_its_own_host_memory(mesh, rules, name):
    model = kvjax.spread(small(), mesh, rules)
    near, far = (kvjax.chain(*SENTENCES[name], *host) for host in ((), (FAR,)))
    (want, here), (got, there) = (talked(one, model, GRANULE + 2) for one in (near, far))
    assert_equal(want, got)
    for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        assert a.sharding.spec == b.sharding.spec
    assert (host_nbytes(there) > 0) == memory.offers_host()


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["full", "kivi"])
def test_a_step_on_a_mesh_sends_nothing_as_large_as_a_list(name):
    model, method = kvjax.spread(small(), "data=2,model=2", "tensor"), kvjax.chain(*SENTENCES[name], FAR)
    _, cache = kvjax.prefill(model, PROMPTS, method=method, room=400)
    bare, run = bare_cache(cache), decoding(model, method, None)
    args = run, model.params, bare, jnp.zeros(2, jnp.int32), jnp.ones(2, bool)
    sent = collectives(steps.step.lower(*args).compile().as_text())
    assert {one.kind for one in sent} == {"all-reduce"}
    assert sum(one.bytes for one in sent) < nbytes(cache) / 50


def test_what_the_word_cannot_do_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="pages of equally many slots on the device, .* such as snapkv"):
        kvjax.chain(kvjax.method("adakv", budget=0.5), kvjax.method("quest", budget=0.5), Host(0.5))
    with pytest.raises(
        ValueError, match="brings one layer after the other, .* stores two layers as one: leave"
    ):
        kvjax.chain(kvjax.method("minicache"), Host())
    with pytest.raises(kvjax.InputError, match="several layers read the slots that it brings"):
        kvjax.prefill(conversation.model("yoco"), conversation.TEXTS[:2, :13], method=FAR, room=8)


def test_rows_that_a_tpu_cannot_bring_are_refused(monkeypatch):
    monkeypatch.setattr(by_layer, "platform", lambda: "tpu")
    shape, pos = (1, 1, 1, 128), jnp.zeros((1, 1, 1, 128), jnp.int32)
    for width, dtype in ((64, jnp.bfloat16), (128, jnp.int8)):
        slots = Slots(jnp.zeros((*shape, width), dtype), None, pos)
        with pytest.raises(NotImplementedError, match=f"rows of {width} .* multiples of 128 numbers"):
            by_layer.far(slots)
    assert by_layer.far(Slots(jnp.zeros((*shape, 128), jnp.bfloat16), None, pos)).far


@pytest.mark.rotating
def test_where_there_is_one_memory_layers_lie_there_and_are_read_alike(rng, monkeypatch):
    k, v = (jnp.asarray(rng.normal(size=(2, 1, 2, 6, 4)), jnp.float32) for _ in range(2))
    slots = Slots(k, v, jnp.zeros((2, 1, 2, 6), jnp.int32))
    far = by_layer.far(slots)
    monkeypatch.setattr(memory, "offers_host", lambda: False)
    monkeypatch.setattr("kvjax.state.cache.offers_host", lambda: False)
    here = by_layer.far(slots)
    assert not memory.in_host(here.k) and host_nbytes(here) == 0
    for one in (far, here):
        brought = by_layer.brought(one, 1)
        mine = by_layer.of_layer(brought, 1)
        assert_equal((mine.k, mine.v), (k[1:], v[1:]))
        new = dataclasses.replace(mine, k=mine.k + 1, v=mine.v + 1)
        put = by_layer.stored(brought, new, jnp.asarray([[2, 6]], jnp.int32), 1)
        size = block(6)
        first = slice(2 // size * size, (2 // size + 1) * size)
        want = np.array(k)
        want[1, 0, 0, first] += 1
        if memory.in_host(one.k):
            assert_equal(put.k, want)
