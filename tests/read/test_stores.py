"""Reads beside stores: keys that lie unrotated, and codes that were fitted to each layer."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.grammar import Method, Store

PROMPT = [[(7 * i * i + 3 * i) % 199 + 1 for i in range(120)]]
READS = [
    "quest",
    "sparq",
    "pqcache",
    "magicpig",
    "infllm",
    "loki",
    "double-sparsity",
    "clusterkv",
    "tokenselect",
]
FIRST = {"sparq"}
SMALL = {"infllm": "page=8, newest=16, sinks=2", "tokenselect": "newest=16, sinks=2"}


@pytest.fixture(scope="module")
def model():
    return kvjax.load("recall-tiny")


def written(model, method):
    """Logits behind a prompt and 20 tokens, which fill pages anew, and the cache."""
    logits, cache = kvjax.prefill(model, PROMPT, method=method, room=32)
    out = [logits]
    for token in range(20):
        logits, cache = kvjax.step(model, cache, [token + 5])
        out.append(logits)
    return np.concatenate(out), cache


@pytest.mark.rotating
@pytest.mark.parametrize(
    "name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.rotating) for n in READS]
)
def test_keys_that_lie_unrotated_are_read_as_rotated_ones(model, name):
    """What is read, and every logit, is that of the same read over keys that are stored rotated."""
    read = kvjax.method(f"{name}(budget=0.5, {SMALL.get(name, '')})")
    rotated, cache = written(model, read)
    unrotated, other = written(model, kvjax.chain(read, Method(store=Store(unrotated=True))))
    np.testing.assert_allclose(unrotated, rotated, rtol=1e-4, atol=1e-4)
    body, lying = (np.asarray(c.groups[-1].bodies[0].k) for c in (cache, other))
    assert np.abs(body - lying).max() > 1
    assert np.abs(rotated - written(model, None)[0]).max() > 0.1


@pytest.mark.rotating
@pytest.mark.parametrize("store", ["kvquant", "kvquant(sinks=0)"])
@pytest.mark.parametrize("read", ["sparq(budget=1.0)", "pqcache(budget=1.0)", "loki(budget=1.0)"])
def test_a_read_of_all_codes_that_were_fitted_is_the_store_alone(model, store, read):
    alone, read = kvjax.method(store), kvjax.method(read)
    residual = max(alone.store.residual, getattr(read.read, "newest", 0))
    twin = dataclasses.replace(alone, store=dataclasses.replace(alone.store, residual=residual))
    np.testing.assert_allclose(
        written(model, kvjax.chain(alone, read))[0], written(model, twin)[0], rtol=1e-4, atol=1e-3
    )
