"""Slots that are chosen for a query which the input of the layer below predicts, against float64 numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.api.prefill import bare_cache
from kvjax.grammar import Budget
from kvjax.ops.base import memory
from kvjax.pure import decoding
from kvjax.read.foreseen import ForeseenSlots
from kvjax.state.cache import host_nbytes, nbytes
from tests.float64.reads_by_index import infinigen
from tests.float64.reference import Decoder, Prompt, Row
from tests.methods.battery import MAIN, B, off
from tests.models import conversation
from tests.read.test_persistent import model

HYPER = dict(alpha=0.4, window=6, newest=3)
METHOD = kvjax.method("infinigen", budget=0.5, columns=0.2, skip_layers=1, **HYPER)
FAR = kvjax.method("infinigen", budget=0.5, columns=0.2, skip_layers=1, resident=0.0, **HYPER)
TOKENS = np.random.default_rng(7).integers(0, 64, (5, B))


def half(slots):
    return max(1, slots // 2)


@pytest.mark.rotating
def test_alpha_and_the_budget_bound_what_each_head_reads():
    """Three layers over rows of several lengths: of some lists alpha decides, of others the budget."""
    m, seen = model(layers=3), []
    _, cache = kvjax.prefill(m, MAIN.first, method=METHOD, room=8)
    rows = []
    for tokens in MAIN.first:
        prompt, attends = Prompt(Decoder(m), tokens), infinigen(half, columns=3, skip=1, seen=seen, **HYPER)
        rows.append(Row(prompt, [np.ones((len(k), len(tokens)), bool) for k in prompt.k], attends=attends))
    for token in TOKENS:
        logits, cache = kvjax.step(m, cache, token)
        assert off(logits, np.stack([r.step(t) for r, t in zip(rows, token, strict=True)])) < 3e-5
    at_budget = [read == half(old) for read, old in seen]
    assert 0.1 < np.mean(at_budget) < 0.9


def body_of(cache, layer):
    return cache.groups[layer].bodies[0]


@pytest.mark.rotating
def test_what_a_layer_brings_from_host_memory_is_known_before_the_layer_below_has_attended():
    """The output map of layer 1 is NaN: layer 2 brings the same slots, and computes NaN with them."""
    m = kvjax.prepare(model(layers=3), FAR)
    _, cache = kvjax.prefill(m, MAIN.first, method=FAR, room=8)
    layers = list(m.params["layers"])
    layers[1] = layers[1] | {"o": jnp.full_like(layers[1]["o"], jnp.nan)}
    args = bare_cache(cache), jnp.asarray(TOKENS[0]), jnp.ones(B, bool)
    broken = m.params | {"layers": tuple(layers)}
    found = [steps.step_keeping(decoding(m, FAR, None), p, *args) for p in (m.params, broken)]
    assert np.isfinite(found[0][0]).all() and not np.isfinite(found[1][0]).any()
    brought = [np.sort(np.asarray(body_of(cache, 2).near.pages), -1) for _, cache in found]
    np.testing.assert_array_equal(*brought)
    assert (brought[0] >= 0).sum() > 2 * B


@pytest.mark.rotating
def test_slots_in_host_memory_are_read_as_those_of_the_device():
    m, found = model(layers=2), []
    for method in (METHOD, FAR):
        _, cache = kvjax.prefill(m, MAIN.first, method=method, room=8)
        logits = []
        for token in TOKENS:
            out, cache = kvjax.step(m, cache, token)
            logits.append(out)
        found.append((np.stack(logits), cache))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    body = body_of(found[1][1], 1)
    # The device holds what a step reads at most; layer 0 reads everything and stays on the device.
    assert host_nbytes(found[1][1]) == (nbytes((body.k, body.v)) if memory.offers_host() else 0)
    assert body.near.slots.capacity == FAR.read.pages_visited(body.capacity) < body.capacity


def test_a_newest_window_longer_than_the_prompt_reads_everything():
    m, long = model(layers=2), kvjax.method("infinigen", budget=1, columns=0.2, window=64, newest=64)
    caches = [kvjax.prefill(m, MAIN.first, method=x, room=8)[1] for x in (long, kvjax.method("full"))]
    for token in TOKENS[:2]:
        logits, caches = zip(*(kvjax.step(m, cache, token) for cache in caches), strict=True)
        assert off(*map(np.asarray, logits)) < 1e-5


def test_models_without_a_layer_below_to_predict_from_are_refused():
    with pytest.raises(ValueError, match="skip_layers must be a whole number >= 1, got 0"):
        kvjax.method("infinigen", budget=0.5, skip_layers=0)
    with pytest.raises(ValueError, match="expected at least 1: the first layer has no layer below it"):
        ForeseenSlots(Budget(0.5), skip_layers=0)
    with pytest.raises(kvjax.InputError, match="several read them. Use quest"):
        kvjax.prefill(conversation.model("yoco"), conversation.TEXTS[:2, :13], method=METHOD, room=8)
