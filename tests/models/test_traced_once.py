"""Layers that do the same are traced once, and answer as layers do that are traced one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models import transformer
from kvjax.models.mixer import Memory
from kvjax.models.transformer import stack
from kvjax.state.cache import NOTHING
from tests.sweep import sweep

# What layers keep, read, store and merge; "asymkv" stores its first layers in other codes.
METHODS = [
    "full", "h2o(budget=0.5)", "adakv(budget=0.5, window=4)", "kivi(bits=2)", "quest(budget=0.5)",
    "asymkv(key_layers=2, value_layers=1)", "pyramidkv(budget=0.5, window=4)", "minicache(start=2)",
    "aqua-kv", "tidaldecode(budget=0.5)", "infinigen(budget=0.5)", "xquant-cl", "fastkv(budget=0.5)",
    "expected-attention(budget=0.5)",
]  # fmt: skip


@pytest.fixture
def traces(monkeypatch):
    """Record the numbers of the layers that are traced."""
    found, block = [], transformer.block

    def counted(p, x, layer, *others):
        found.append(layer.number)
        return block(p, x, layer, *others)

    monkeypatch.setattr(transformer, "block", counted)
    return found


def test_layers_that_do_the_same_are_traced_once(traces):
    model = kvjax.load("recall-tiny")
    run = kvjax.pure.static(model, "h2o(budget=0.5)")
    prompt = jnp.ones((1, 24), jnp.int32)
    cache = jax.eval_shape(lambda p, t: kvjax.pure.prefill(run, p, t, room=4), model.params, prompt)[1]
    assert model.config.layers == 4 and len(traces) == 1
    jax.eval_shape(lambda p, c: kvjax.pure.step(run, p, c, prompt[:, 0]), model.params, cache)
    assert len(traces) == 2


def answers(text: str) -> list[np.ndarray]:
    """Compute the logits of a prompt and three steps, and the positions that stay."""
    jax.clear_caches()
    model, method = kvjax.load("recall-tiny"), kvjax.method(text)
    if method.make is not None:
        model = kvjax.prepare(model, method)
    prompt = [[*range(1, 41)]]
    logits, cache = kvjax.prefill(model, prompt, method=method, room=8)
    out = [logits]
    for token in (5, 6, 7):
        logits, cache = kvjax.step(model, cache, [token])
        out.append(logits)
    return [np.asarray(x) for x in (*out, *jax.tree.leaves(kvjax.kept_positions(cache)))]


@pytest.mark.parametrize("text", sweep(METHODS, "h2o(budget=0.5)"))
def test_results_are_those_of_layers_traced_one_by_one(text, monkeypatch):
    shared = answers(text)
    monkeypatch.setattr(transformer.TracedOnce, "__init__", lambda self, *_: setattr(self, "alike", None))
    for mine, own in zip(shared, answers(text), strict=True):
        np.testing.assert_allclose(mine, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("traced", [True, False])
def test_a_trace_that_reads_parameters_from_outside_is_not_repeated(traced, traces):
    model = kvjax.load("recall-tiny")

    def read(params, tokens):
        pos = jnp.arange(6, dtype=jnp.int32)[None]

        def attend(layer, x, state):
            # A trace that is repeated would read those of its first layer.
            return x.q * params["layers"][layer.group]["attn_norm"].mean(), state, {}

        memory = Memory(pos, attend, attend, lambda layer, state: [], alike=(0,) * 4)
        return stack(params, tokens, model.config, memory, (NOTHING,) * 4).x

    scaled = [p | {"attn_norm": p["attn_norm"] * i} for i, p in enumerate(model.params["layers"], 1)]
    params = model.params | {"layers": tuple(scaled)}
    tokens = jnp.ones((1, 6), jnp.int32)
    jax.eval_shape(read, params, tokens) if traced else jax.eval_shape(lambda t: read(params, t), tokens)
    assert traces[-4:] == [0, 1, 2, 3]
