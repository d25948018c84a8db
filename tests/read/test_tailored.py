"""Layers of few bits below layers that read few tokens, in host memory too."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.grammar import Budget, Method
from kvjax.ops.base import memory
from kvjax.read.narrow_keys import HeavyProducts
from kvjax.state.cache import host_nbytes, nbytes
from tests.methods.battery import MAIN, B
from tests.read.test_persistent import model

HYPER = dict(quantised=1, group=8, channels=4, window=6, newest=4)
TOKENS = np.random.default_rng(7).integers(0, 64, (9, B))


def talked(method, m, turns=(MAIN.first,)):
    """Logits of prompts and of steps after each, and the cache after them."""
    cache, found = None, []
    for prompt in turns:
        logits, cache = kvjax.prefill(m, prompt, cache=cache, method=None if cache else method, room=12)
        found.append(logits)
        for token in TOKENS:
            logits, cache = kvjax.step(m, cache, token)
            found.append(logits)
    return np.stack(found), cache


@pytest.mark.rotating
def test_each_layer_does_what_its_own_method_does():
    """Two layers: KIVI's codes below the read alone, over two turns."""
    m, turns = model(layers=2), (MAIN.first, MAIN.second)
    read = Method(read=HeavyProducts(Budget(0.25), 4, 0, 4, 6))
    each = kvjax.by_layer([kvjax.method("kivi", bits=2, group=8, residual=4), read])
    tailored = kvjax.method("tailorkv", budget=0.25, **HYPER)
    (want, a), (got, b) = (talked(x, m, turns) for x in (each, tailored))
    np.testing.assert_array_equal(got, want)
    assert nbytes(a) == nbytes(b)


@pytest.mark.rotating
def test_layers_that_read_few_tokens_lie_in_host_memory_and_those_of_few_bits_do_not():
    m = model(layers=2)
    (want, _), (got, cache) = (
        talked(kvjax.method("tailorkv", budget=0.25, **HYPER, **at), m) for at in ({}, dict(resident=0.0))
    )
    np.testing.assert_array_equal(got, want)
    dense, sparse = (group.bodies[0] for group in cache.groups)
    codes = *dense.k.data.values(), *dense.v.data.values()
    assert dense.near is None and not any(map(memory.in_host, codes))
    assert host_nbytes(cache) == (nbytes((sparse.k, sparse.v)) if memory.offers_host() else 0)
    assert sparse.near.slots.capacity < sparse.capacity / 2


def test_channels_are_those_of_the_largest_products_of_queries_and_keys():
    """Channel 0 has the largest keys, channel 2 the largest queries, and channel 1 the largest product."""
    k = jnp.asarray([[[[9.0, 4.0, 1.0], [-9.0, -4.0, 1.0], [0.0, 0.0, 90.0]]]])
    q = jnp.asarray([[[[1.0, 3.0, 8.0], [-1.0, 3.0, -8.0], [90.0, 0.0, 0.0]]]])
    pos, at = jnp.asarray([[[0, 1, -1]]]), jnp.asarray([[2, 3, -1]])
    found = HeavyProducts(Budget(1), rank=1).learn(k, pos, (q, at))
    assert found["directions"].tolist() == [[[[0.0], [1.0], [0.0]]]]


def test_pages_of_what_is_encoded_together_are_still_needed_in_layers_that_read():
    kivi, read = kvjax.method("kivi", group=8), kvjax.method("double-sparsity", budget=0.5)
    with pytest.raises(ValueError, match="multiple of the 8 tokens that are encoded together"):
        kvjax.chain(kivi, read, kvjax.method("offloaded"))
