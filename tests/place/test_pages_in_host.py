"""Unequal heads in host memory: a layer's pages come to the device for its step, and no number changes."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.api.prefill import bare_cache
from kvjax.ops.base import memory
from kvjax.pure import decoding
from kvjax.state.cache import host_nbytes, lies_far, nbytes
from tests.methods.battery import model
from tests.methods.table import BY_LABEL, ROWS
from tests.place.test_by_layer import MESHES, assert_equal, moved, small
from tests.sweep import sweep

needs_host = pytest.mark.skipif(not memory.offers_host(), reason="the backend offers programs no host memory")
FAR = kvjax.method("offloaded")
RNG = np.random.default_rng(5)
FIRST, SECOND = ([RNG.integers(1, 32, n).tolist() for n in sizes] for sizes in ((24, 17), (6, 3)))
TOKENS = RNG.integers(1, 32, (4, 2))


def unequal(row):
    """Whether a row gives heads unequal numbers of slots, and can lie in host memory."""
    method = row.method()
    if method.keep is None or method.keep.allocate.uniform:
        return False
    try:
        kvjax.chain(method, FAR)
    except ValueError:
        return False
    return True


# ADORE has two tiers of equal lists, both in host memory.
LABELS = [*(row.label for row in ROWS if unequal(row)), "adore"]


def talked(asked, method, chunk=None):
    """Logits of a prompt, of steps, of a second turn and of a step after it, and the two caches."""
    logits, held = kvjax.prefill(asked, FIRST, method=method, room=16, chunk=chunk)
    found, cache = [logits], kvjax.fork(held, 1)
    for token in TOKENS:
        logits, cache = kvjax.step(asked, cache, token)
        found.append(logits)
    logits, cache = kvjax.prefill(asked, SECOND, cache=cache, room=8)
    last, cache = kvjax.step(asked, cache, TOKENS[0])
    return np.stack([*found, logits, last]), held, cache


ADAKV = kvjax.method("adakv", budget=0.5, window=4)


@cache
def both():
    return talked(small(), ADAKV), talked(small(), kvjax.chain(ADAKV, FAR))


@pytest.mark.rotating
@pytest.mark.parametrize("label", sweep(LABELS, "adakv"))
def test_unequal_heads_in_host_memory_answer_as_on_the_device(label):
    row = BY_LABEL[label]
    asked, method = model(row.model), row.method()
    (want, _, near), (got, _, far) = talked(asked, method), talked(asked, kvjax.chain(method, FAR))
    # A layer of a pool of several layers is attended to at once, where the device walks through the pool.
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
    assert_equal(kvjax.kept_positions(near), kvjax.kept_positions(far))
    assert nbytes(far) == nbytes(near)
    assert all(pool.far and all(jax.tree.leaves(lies_far((pool,))[0].v)) for pool in far.pools)


@pytest.mark.rotating
@needs_host
def test_keys_and_values_lie_in_host_memory_and_all_else_on_the_device():
    cache = both()[1][1]
    far = [jax.tree_util.keystr(p) for p, x in jax.tree.leaves_with_path(cache) if memory.in_host(x)]
    assert far and all(re.search(r"(pools\[\d\]|tail)\.[kv]$", name) for name in far)
    assert len(far) == 2 * (len(cache.pools) + len(cache.groups))
    assert jax.tree.leaves(lies_far(cache)) == [memory.in_host(x) for x in jax.tree.leaves(cache)]
    assert host_nbytes(cache) == sum(x.nbytes for x in jax.tree.leaves(cache) if memory.in_host(x))
    assert "of them in host memory" in str(kvjax.summary(cache))


@needs_host
def test_a_step_brings_the_pages_of_every_layer_once():
    asked = small()
    _, cache = kvjax.prefill(asked, FIRST, method=kvjax.chain(ADAKV, FAR), room=16)
    bare, run = bare_cache(cache), decoding(asked, cache.method, None)
    traced = steps.step.trace(run, asked.params, bare, jnp.zeros(2, jnp.int32), jnp.ones(2, bool))
    to_device = [shape for way, shape in moved(traced.jaxpr.jaxpr) if way == "to device"]
    pages = [shape for shape in to_device if len(shape) == 3]
    assert sorted(pages) == sorted(pool.k.shape for pool in cache.pools for _ in range(2))
    assert len(to_device) == 2 * (len(cache.pools) + len(cache.groups))
    compiled = traced.lower().compile()
    assert compiled.memory_analysis().alias_size_in_bytes == nbytes(bare)


def stepped(cache):
    return kvjax.step(small(), kvjax.fork(cache, 1), np.arange(cache.next.shape[0]))[0]


CHANGES = {
    "rows taken": lambda c: kvjax.take_rows(c, [1, 1, 0]),
    "rows emptied": lambda c: kvjax.reset_rows(c, [True, False]),
    "copied": lambda c: kvjax.fork(c, 2),
    "taken back": lambda c: kvjax.rollback(kvjax.step(small(), kvjax.fork(c, 1), TOKENS[0])[1], 1),
}


@pytest.mark.rotating
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_cache_goes_on_as_on_the_device_and_stays_where_it_lies(change):
    near, far = (CHANGES[change](held) for _, held, _ in both())
    assert_equal(stepped(near), stepped(far))
    assert all(memory.in_host(pool.v) == memory.offers_host() for pool in far.pools)


@pytest.mark.rotating
def test_a_saved_cache_lies_in_host_memory_again(tmp_path):
    cache = both()[1][1]
    kvjax.save_cache(tmp_path / "a.cache", cache)
    loaded = kvjax.load_cache(tmp_path / "a.cache")
    assert host_nbytes(loaded) == host_nbytes(cache)
    assert_equal(stepped(loaded), stepped(cache))


@pytest.mark.rotating
def test_prompts_in_chunks_and_beams_are_those_of_the_device():
    found = []
    for method in (one[1].method for one in both()):
        chunks, *_ = talked(small(), method, chunk=16)
        beams = kvjax.generate(small(), FIRST, method=method, max_new_tokens=4, beams=2)
        found.append((chunks, beams.tokens))
    assert_equal(*found)


@pytest.mark.rotating
@pytest.mark.parametrize("label", ["adakv", "kvzip"])
def test_stacked_layers_bring_their_pages_one_after_the_other(label):
    """As TPUs run them: one group of layers in a scan, with one pool."""
    more = dict(window=4) if label == "adakv" else dict(prefix=(1, 2))
    method = kvjax.method(label, budget=0.5, **more)
    (want, *_), (got, held, _) = (talked(small(True), one) for one in (method, kvjax.chain(method, FAR)))
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
    (pool,) = held.pools
    assert pool.layers == 2 and 0 < pool.far <= pool.owner.shape[0]


@pytest.mark.rotating
@pytest.mark.parametrize(("mesh", "rules"), MESHES)
def test_on_a_mesh_every_device_has_pages_in_its_own_host_memory(mesh, rules):
    asked = kvjax.spread(small(), mesh, rules)
    (want, *_), (got, held, _) = (talked(asked, one[1].method) for one in both())
    assert_equal(want, got)
    assert (host_nbytes(held) > 0) == memory.offers_host()
