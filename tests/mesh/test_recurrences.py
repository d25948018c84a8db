"""Recurrences and the ranking of pages on a mesh: every device runs the kernels on its own rows and heads."""

from functools import cache, partial

import jax
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.api.prefill import bare_cache
from kvjax.mesh.on_mesh import OnMesh, as_mesh
from kvjax.mesh.rules import as_rules
from kvjax.models.config import Config
from kvjax.models.feed_forward import NoMLP
from kvjax.models.mixers.log_linear import LogLinearDelta, LogLinearMamba2
from kvjax.models.mixers.mamba2 import Mamba2
from kvjax.models.mixers.recurrent import GatedDelta, GatedLinear, KimiDelta, Retention
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.ops.recurrent.gated_delta import HEADS, SEQUENCE, STACK, gated_delta, gated_delta_step
from kvjax.ops.recurrent.recurrence import RecurrenceInputs, StackedState
from kvjax.pure import decoding
from tests.mesh.test_step import collectives
from tests.methods.battery import off
from tests.sweep import sweep

B, T, ROOM, KEYS, VALUES = 2, 11, 5, 8, 128
TPU = "tpu interpret"
EVERY = np.ones(B, bool)
TOKENS = np.random.default_rng(0).integers(0, 32, (B, 515)).astype(np.int32)
MIXERS = {
    "retention": Retention(4, KEYS, VALUES),
    "gla": GatedLinear(4, KEYS, VALUES, rank=3),
    "mamba-2": Mamba2(4, KEYS, VALUES, groups=2),
    "gated delta": GatedDelta(4, KEYS, VALUES, groups=2),
    "kda": KimiDelta(4, KEYS, VALUES, rank=3),
    "log-linear delta": LogLinearDelta(4, KEYS, VALUES, groups=2, levels=4),
    "log-linear mamba-2": LogLinearMamba2(4, KEYS, VALUES, groups=2, levels=4),
}
QUEST = {"quest": dict(page=128, skip_layers=0), "rocketkv": dict(page=128)}
CASES = [(rules, name) for rules in ("tensor", "batch") for name in MIXERS]


@cache
def model(name: str) -> Model:
    mixers = (MIXERS[name],) * 2
    config = Config(32, 16, 2, 4, 2, 8, 16, mixers=mixers, mlps=(NoMLP(),) * 2)
    return Model(config, init(config, jax.random.key(0)))


def spread(m: Model, rules: str) -> Model:
    return kvjax.spread(m, as_mesh("data=2,model=2" if rules == "tensor" else "data=2"), rules)


def talk(m, length=T, method=None):
    """Logits of a prompt and three steps by kernels, the cache between them, and the program of a step."""
    # Other tests read prompts by the kernels of attention.
    how = TPU if method is None else None
    logits, held = kvjax.prefill(m, TOKENS[:, :length], method=method, room=ROOM, implementation=how)
    run, said = decoding(m, held.method, TPU), [logits]
    state = bare_cache(held)
    given = m.params, state, TOKENS[:, length], EVERY
    traced = str(steps.step.trace(run, *given).jaxpr)
    program = steps.step.lower(run, *given).compile()
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert program.memory_analysis().alias_size_in_bytes == held
    for t in range(3):
        logits, state = program(m.params, state, TOKENS[:, length + t], EVERY)
        said.append(logits)
    return said, state, traced, program


def same_on_a_mesh(m, rules, most, *given):
    """Check that one device and a mesh say the same by kernels; no collective has over `most` numbers."""
    said, state, traced, _ = talk(m, *given)
    on_mesh, moved, of_mesh, program = talk(spread(m, rules), *given)
    count = traced.count("pallas_call[")
    assert of_mesh.count("pallas_call[") == count > 0 and of_mesh.count("shard_map") >= count
    for a, b in zip(on_mesh, said, strict=True):
        assert off(a, b) < 1e-5
    for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(state), strict=True):
        assert off(a, b) < 1e-5
    assert max(collectives(program.as_text()), default=0) <= most
    return traced


@pytest.mark.parametrize("rules, name", sweep(CASES))
def test_recurrent_layers_run_the_kernels_that_they_run_on_one_device(rules, name):
    # What one token makes of queries, keys and values, side by side; a state has seven times as many.
    same_on_a_mesh(model(name), rules, B * 4 * (2 * KEYS + VALUES))


@pytest.mark.parametrize("rules, name", sweep([(r, name) for r in ("tensor", "batch") for name in QUEST]))
def test_pages_are_ranked_by_the_kernel_and_on_the_device_that_has_them(rules, name):
    config = Config(32, 16, 2, 4, 2, 128, 16)
    m, method = Model(config, init(config, jax.random.key(0))), kvjax.method(name, budget=0.5, **QUEST[name])
    # Not even what ranks the pages is sent: queries and outputs alone.
    traced = same_on_a_mesh(m, rules, B * 4 * 128, 512, method)
    assert "page_scores" in traced


def of_device(x, axes, on):
    return jax.device_put(x, on.sharding((*axes, *(None,) * (x.ndim - len(axes))), x.shape))


@pytest.fixture
def fed(rng):
    """Tokens of a sequence with unit keys, and a state before it; and a mesh of rows and heads."""
    q, k, v, p = (rng.normal(size=(B, T, 4, n)).astype(np.float32) for n in (KEYS, KEYS, VALUES, KEYS))
    k, p = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (k, p))
    g = -rng.uniform(size=(B, T, 4, 1)).astype(np.float32)
    state = rng.normal(size=(B, 4, KEYS, VALUES)).astype(np.float32)
    return (
        RecurrenceInputs(q, k, v, g, p),
        state,
        OnMesh(as_mesh("data=2,model=4"), as_rules("tensor", ("data", "model"))),
    )


def test_one_token_writes_the_states_of_every_device_where_they_lie(fed):
    tokens, state, on = fed
    token = jax.tree.map(lambda x: x[:, 0], tokens)
    layers = of_device(np.stack([state, 2 * state]), STACK, on)
    spread = jax.tree.map(lambda x: of_device(x, HEADS, on), token)

    @partial(jax.jit, donate_argnums=0)
    def one(layers, token):
        out, new = gated_delta_step(StackedState(layers, 1), token, implementation=TPU, on=on)
        return out, new.layers

    program = one.lower(layers, spread).compile()
    assert program.memory_analysis().alias_size_in_bytes == layers.nbytes // 8
    assert not collectives(program.as_text())
    out, new = program(layers, spread)
    # The equation in float64.
    q, k, v, g, p = (np.float64(x) for x in token[:5])
    decayed = np.exp(g)[..., None] * 2 * np.float64(state)
    want = decayed + np.einsum("bhk,bhv->bhkv", k, v - np.einsum("bhkv,bhk->bhv", decayed, p))
    np.testing.assert_allclose(new, np.stack([state, want]), atol=1e-5)
    np.testing.assert_allclose(out, np.einsum("bhkv,bhk->bhv", want, q), atol=1e-5)


@pytest.mark.rotating
def test_gradients_of_a_sequence_on_a_mesh_are_those_of_one_device(fed):
    tokens, state, on = fed
    spread = jax.tree.map(lambda x: of_device(x, SEQUENCE, on), tokens), of_device(state, HEADS, on)

    def loss(given, on, implementation):
        out, last = gated_delta(*given, implementation=implementation, on=on)
        return (out**2).sum() + (last**3).sum()

    found = jax.jit(jax.grad(loss), static_argnums=(1, 2))
    got, want = found(spread, on, TPU), found((tokens, state), None, "reference")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
