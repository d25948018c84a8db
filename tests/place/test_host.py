"""Keys and values in host memory: where they lie, what a step moves, and that no number changes."""

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
from kvjax.compress.unread import unread_bytes
from kvjax.grammar import Budget
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.ops.base import memory
from kvjax.place.host import Host, HostValues, fetched, in_host_memory
from kvjax.pure import decoding
from kvjax.read.pages import PageBounds
from kvjax.state.cache import Slots, host_nbytes, nbytes
from tests.mesh.test_step import collectives
from tests.methods.battery import MAIN, ROOM, VOCAB, B
from tests.models import conversation
from tests.sweep import sweep

PAGE = 4
READ = PageBounds(Budget(2 * PAGE), PAGE, 0)
NEAR = kvjax.method("quest", budget=0.25, page=PAGE, skip_layers=0)
FAR = kvjax.chain(NEAR, Host(0.5))
VALUES = dict(budget=0.25, newest=4)
needs_host = pytest.mark.skipif(not memory.offers_host(), reason="the backend offers programs no host memory")


@cache
def small():
    """One layer: programs of it are made fast."""
    config = Config(vocab=VOCAB, d_model=32, layers=1, heads=4, kv_heads=2, head_dim=16, d_ff=48)
    return Model(config, init(config, jax.random.key(5)))


def body_of(cache):
    (body,) = cache.groups[-1].bodies
    return body


def talked(method, model=None):
    """Logits of a prompt and of steps, long enough that tails are flushed, and the cache behind them."""
    model = model or small()
    logits, cache = kvjax.prefill(model, MAIN.first, method=method, room=ROOM)
    found = [logits]
    for token in np.random.default_rng(3).integers(0, VOCAB, (2 * PAGE, B)):
        logits, cache = kvjax.step(model, cache, token)
        found.append(logits)
    return found, cache


@pytest.fixture(scope="module")
def both():
    """Hold the same conversation over a body on the device and in host memory."""
    return talked(NEAR), talked(FAR)


@pytest.mark.rotating
def test_every_number_is_that_of_the_same_method_on_the_device(both):
    (want, near), (got, far) = both
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in ((body_of(near).k, body_of(far).k), (body_of(near).v, body_of(far).v)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.rotating
@needs_host
def test_keys_and_values_of_the_body_lie_in_host_memory_and_all_else_on_the_device(both):
    _, (_, cache) = both
    kinds = {
        jax.tree_util.keystr(path): x.sharding.memory_kind for path, x in jax.tree.leaves_with_path(cache)
    }
    far = {name for name, kind in kinds.items() if kind == memory.KIND}
    assert far == {name for name in kinds if re.search(r"\.bodies\[0\]\.[kv]$", name)} and len(far) == 2
    assert host_nbytes(cache) == sum(x.nbytes for x in jax.tree.leaves(cache) if memory.in_host(x)) > 0
    body = body_of(cache)
    pages = body.capacity // PAGE
    assert body.near.slots.capacity == pages // 2 * PAGE
    assert nbytes((body.near.slots.k, body.near.slots.v)) * 2 == nbytes((body.k, body.v))


def equations(jaxpr, name):
    """Yield the operands and results of all equations of a name, those of inner programs too."""
    for one in jaxpr.eqns:
        if one.primitive.name == name:
            yield [x.aval for x in one.invars], [x.aval for x in one.outvars]
        for inner in jax.tree.leaves(list(one.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner, name)


@pytest.mark.rotating
@needs_host
def test_a_step_moves_pages_alone_between_the_memories_and_keeps_those_of_the_cache(both):
    _, (_, cache) = both
    bare, run = bare_cache(cache), decoding(small(), FAR, None)
    args = (run, small().params, bare, jnp.zeros(B, jnp.int32), jnp.ones(B, bool))
    traced = steps.step.trace(*args)
    moved = list(equations(traced.jaxpr.jaxpr, "device_put"))
    # Keys and values: a page comes to the device, and another one goes back where a tail is full.
    assert len(moved) == 4
    for (old,), (new,) in moved:
        assert old.shape == new.shape == (1, PAGE, 16)
        assert {old.memory_space, new.memory_space} == {memory.HOST, memory.DEVICE}
    sliced = [
        ins[0]
        for ins, _ in equations(traced.jaxpr.jaxpr, "dynamic_slice")
        if ins[0].memory_space == memory.HOST
    ]
    assert len(sliced) == 2
    compiled = traced.lower().compile()
    (layout,) = re.findall("entry_computation_layout=(.*)allow_spmd", compiled.as_text().split("\n")[0])
    assert [side.count("S(5)") for side in layout.split("->")] == [2, 2]
    assert compiled.memory_analysis().alias_size_in_bytes == nbytes(bare)


def drawn(rng, places=3):
    """Draw a body of two layers and of six pages in host memory, of which row 1 fills four."""
    shape = (2, 2, 2, 6 * PAGE)
    pos = np.broadcast_to(np.arange(shape[3]), shape).copy()
    pos[:, 1, :, 4 * PAGE :] = -1
    k, v = (jnp.asarray(rng.normal(size=(*shape, 5)), jnp.float32) for _ in range(2))
    return in_host_memory(Host(places / 6), READ, Slots(k, v, jnp.asarray(pos, jnp.int32)))


@pytest.mark.rotating
def test_the_device_holds_the_pages_that_were_read_last_and_fetches_no_other(rng):
    body, fetch = drawn(rng), jax.jit(fetched, static_argnums=4)
    before, last = jax.tree.map(np.asarray, body), {}
    for step in range(12):
        pages = np.stack([[rng.permutation(4)[:2] for _ in range(2)] for _ in range(2)])
        counts, old = rng.integers(0, 3, (2, 2)), np.asarray(body.near.pages[1])
        body, places = fetch(body, 1, jnp.asarray(pages, jnp.int32), jnp.asarray(counts, jnp.int32), PAGE)
        near = jax.tree.map(np.asarray, body.near)
        for b, i in np.ndindex(2, 2):
            read, new = pages[b, i, : counts[b, i]].tolist(), near.pages[1, b, i]
            last |= {(b, i, page): step for page in read}
            held = {*old[b, i].tolist(), *read} - {-1}
            gone = held - {*new.tolist()}
            assert {*new.tolist()} - {-1} == held - gone and len(gone) == max(len(held) - 3, 0)
            assert all(last[b, i, x] <= last[b, i, y] for x in gone for y in held - gone)
            # What stays lies where it lay, and what is read lies where the places say.
            assert all(new[place] == page for place, page in enumerate(old[b, i]) if page in held - gone)
            for page, place in zip(read, np.asarray(places)[b, i], strict=False):
                here, there = (slice(x * PAGE, (x + 1) * PAGE) for x in (place, page))
                for name in ("k", "v", "pos"):
                    copy, original = getattr(near.slots, name), getattr(before, name)
                    np.testing.assert_array_equal(copy[1, b, i, here], original[1, b, i, there])
    assert (near.pages[0] == -1).all() and (near.slots.k[0] == 0).all()


def test_what_a_step_reads_is_counted_once(both):
    (_, near), (_, far) = both
    for held, method in ((near, NEAR), (far, FAR)):
        gm = steps.Run(small().config, method).groups(small().params)[-1]
        body = body_of(held)
        visited = gm.read.pages_visited(body.capacity) * PAGE
        read = nbytes((body.k, body.v)) * visited // body.capacity
        copies = 0 if body.near is None else nbytes((body.near.slots.k, body.near.slots.v))
        assert nbytes((body.k, body.v)) + copies - unread_bytes(gm, held.groups[-1]) == read


def in_tail(cache):
    """How many of every row's newest tokens lie in the tail."""
    return np.asarray((cache.groups[-1].tail.pos[0, :, 0] >= 0).sum(-1))


def stepped(cache, method):
    token = np.arange(cache.next.shape[0]) % VOCAB
    return kvjax.step(small(), kvjax.fork(cache, 1), token)[0]


CHANGES = {
    "rows taken": lambda c: kvjax.take_rows(c, [1, 1, 0]),
    "rows emptied": lambda c: kvjax.reset_rows(c, [True, *[False] * (B - 1)]),
    "a second turn": lambda c: kvjax.prefill(small(), MAIN.second, cache=c, room=8)[1],
    "taken back": lambda c: kvjax.rollback(kvjax.fork(c, 1), in_tail(c).clip(max=1)),
}


@pytest.mark.rotating
@pytest.mark.parametrize("change", sweep(CHANGES, "rows emptied"))
def test_a_changed_cache_goes_on_as_on_the_device_and_stays_where_it_lies(both, change):
    caches = [CHANGES[change](cache) for _, cache in both]
    for a, b in zip(*(stepped(c, c.method) for c in caches), strict=True):
        np.testing.assert_array_equal(a, b)
    assert memory.in_host(body_of(caches[1]).k) == memory.offers_host()


def test_a_saved_cache_lies_in_host_memory_again_and_answers_as_before(tmp_path):
    method = kvjax.method("quest", budget=0.25, page=PAGE, skip_layers=0, resident=0.5)
    assert method.host == Host(0.5) and method.read == NEAR.read
    _, cache = kvjax.prefill(small(), MAIN.first, method=method, room=ROOM)
    kvjax.save_cache(tmp_path / "a.cache", cache)
    loaded = kvjax.load_cache(tmp_path / "a.cache")
    assert memory.in_host(body_of(loaded).k) == memory.offers_host()
    np.testing.assert_array_equal(stepped(loaded, method), stepped(cache, method))


@pytest.mark.rotating
@pytest.mark.parametrize("store", ["int8", "kivi"])
def test_codes_lie_in_host_memory_too(store):
    more = kvjax.method(store, **(dict(bits=4, group=16, residual=16) if store == "kivi" else {}))
    read = kvjax.method("quest", budget=0.5, page=16, skip_layers=0)
    (want, _), (got, cache) = (talked(kvjax.chain(more, read, *host)) for host in ((), (Host(0.0),)))
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(memory.in_host(x) == memory.offers_host() for x in jax.tree.leaves(body_of(cache).k))


@pytest.mark.rotating
def test_prompts_in_chunks_and_searches_are_those_of_the_device():
    found = []
    for method in (NEAR, FAR):
        chunks, _ = kvjax.prefill(small(), MAIN.first, method=method, room=ROOM, chunk=8)
        beams = kvjax.generate(small(), MAIN.first, method=method, max_new_tokens=5, beams=2)
        found.append((chunks, beams.tokens, beams.logprobs))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_what_the_word_cannot_do_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="resident is 2, expected a share from 0 to 1"):
        Host(2)
    with pytest.raises(ValueError, match="looks at .*all keys: use quest for"):
        kvjax.chain(kvjax.method("sparq", budget=0.5), Host(0.5))
    with pytest.raises(ValueError, match="at most one host; this chain has two"):
        kvjax.chain(NEAR, Host(0.5), Host(0.25))
    with pytest.raises(kvjax.InputError, match="several layers read the slots that it brings"):
        kvjax.prefill(conversation.model("yoco"), conversation.TEXTS[:2, :13], method=FAR, room=8)


def test_a_cache_that_lies_on_several_devices_by_no_rules_is_refused(rng):
    mesh = jax.make_mesh((2,), ("rows",))
    spread = jax.NamedSharding(mesh, jax.P(None, "rows"))
    body = jax.tree.map(lambda x: jax.device_put(memory.to_device(x), spread), drawn(rng))
    with pytest.raises(NotImplementedError, match="place the model by kvjax.spread"):
        fetched(body, 1, jnp.zeros((2, 2, 1), jnp.int32), jnp.ones((2, 2), jnp.int32), PAGE)


@pytest.mark.rotating
@pytest.mark.parametrize(("mesh", "rules"), [("data=2,model=2", "tensor"), ("data=4", "batch")])
def test_on_a_mesh_every_device_fetches_pages_of_its_own_lists(mesh, rules):
    model = kvjax.spread(small(), mesh, rules)
    values = kvjax.method("kcache", **VALUES), kvjax.method("kcache", **VALUES, resident=0.3)
    jax.tree.map(np.testing.assert_array_equal, *(talked(method, model)[0] for method in values))
    (want, _), (got, cache) = talked(NEAR, model), talked(FAR, model)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    body, bare = body_of(cache), bare_cache(cache)
    assert memory.in_host(body.k) == memory.offers_host()
    assert body.k.sharding.spec == body.near.slots.k.sharding.spec != jax.P()
    args = decoding(model, FAR, None), model.params, bare, jnp.zeros(B, jnp.int32), jnp.ones(B, bool)
    # Not a page is sent: a layer's activations alone, 32 numbers a row.
    assert max(collectives(steps.step.lower(*args).compile().as_text()), default=0) <= B * 32


@pytest.mark.rotating
def test_where_there_is_one_memory_the_body_stays_there_and_is_read_alike(rng, monkeypatch):
    pages, counts = jnp.asarray(np.tile([3, 1], (2, 2, 1)), jnp.int32), jnp.asarray([[2, 1], [1, 2]])
    far = drawn(rng)
    monkeypatch.setattr(memory, "offers_host", lambda: False)
    monkeypatch.setattr("kvjax.state.cache.offers_host", lambda: False)
    here = in_host_memory(
        Host(0.5), READ, jax.tree.map(memory.to_device, dataclasses.replace(far, near=None))
    )
    assert not memory.in_host(here.k) and host_nbytes(here) == 0
    for a, b in zip(*(jax.tree.leaves(fetched(x, 1, pages, counts, PAGE)) for x in (far, here)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.rotating
def test_what_is_estimated_of_clusters_in_host_memory_is_that_of_the_device():
    more = dict(budget=0.3, clusters=4, turns=3, sinks=2, newest=4)
    near, far = (kvjax.method("retroinfer", **more, **at) for at in ({}, dict(resident=0.3)))
    (want, _), (got, cache) = talked(near), talked(far)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.abs(np.stack(got[1:]) - np.stack(talked(kvjax.method("full"))[0][1:])).max() > 1e-4
    body = body_of(cache)
    # The device holds what a step reads at most, not the body.
    assert host_nbytes(cache) == (nbytes((body.k, body.v)) if memory.offers_host() else 0)
    assert body.near.slots.capacity == far.read.pages_visited(body.capacity) < body.capacity / 2


@pytest.fixture(scope="module")
def by_values():
    """Hold the same conversation over values on the device and in host memory."""
    return [talked(kvjax.method("kcache", **VALUES, **at)) for at in ({}, dict(resident=0.3))]


@pytest.mark.rotating
def test_values_alone_lie_in_host_memory_and_no_number_changes(by_values):
    (want, _), (got, cache) = by_values
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(a, b)
    body = body_of(cache)
    assert memory.in_host(body.v) == memory.offers_host() and not memory.in_host(body.k)
    assert host_nbytes(cache) == nbytes(body.v)
    for a, b in zip(*(stepped(CHANGES["rows taken"](c), c.method) for _, c in by_values), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.rotating
@needs_host
def test_a_step_moves_no_key_between_the_memories(by_values):
    _, (_, cache) = by_values
    args = small().params, bare_cache(cache), jnp.zeros(B, jnp.int32), jnp.ones(B, bool)
    traced = steps.step.trace(decoding(small(), cache.method, None), *args)
    moved = list(equations(traced.jaxpr.jaxpr, "device_put"))
    # One value comes to the device, and another one goes back where a tail is full.
    assert [old.shape for (old,), _ in moved] == [(1, 1, 16)] * 2


def test_what_brings_values_alone_needs_a_read_that_picks_in_every_step():
    with pytest.raises(ValueError, match="RecycledSlots.* picks otherwise: use a read such as kcache"):
        kvjax.chain(kvjax.method("recycled-attention", budget=0.5), HostValues())
