"""The plan of a decode step: a method has the hooks that it needs, and every one of them does something."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax import steps
from kvjax.pure import static
from kvjax.steps.decoding.plan import step_plan
from tests.methods.battery import model
from tests.methods.table import BY_LABEL, ROWS
from tests.sweep import sweep

FIRST = ("full", "h2o", "quest", "adakv", "less")
STORED = ["append_token", "rotate_queries"]


def traced(asked, method, monkeypatch):
    """Record a traced step's hooks by layer, with whether they changed anything, and those behind."""
    run, seen, ends = static(asked, method), [], []

    def watched(hook, first):
        def call(here):
            if first:
                seen.append([])
            after = hook(here)
            seen[-1].append((hook.__name__, any(a is not b for a, b in zip(here, after, strict=True))))
            return after

        return call

    def planned(*given):
        plan = step_plan(*given)
        ends.extend(hook.__name__ for hook in plan.end)
        layers = (tuple(watched(hook, i == 0) for i, hook in enumerate(hooks)) for hooks in plan.layers)
        return plan._replace(layers=tuple(layers))

    monkeypatch.setattr("kvjax.steps.decoding.step.step_plan", planned)
    params = kvjax.prepare(asked, method).params | {"fitted": kvjax.pure.fitted(run.method) or {}}
    prompt = jnp.ones((1, 24), jnp.int32)
    cache = jax.eval_shape(partial(kvjax.pure.prefill, run, room=4), params, prompt)[1]
    jax.eval_shape(partial(steps.step_fn, run.stepping), params, cache, prompt[:, 0], jnp.ones(1, bool))
    return seen, ends


H2O = ("h2o(budget=0.5)", [*STORED, "attend", "count_stored_tokens_only", "evict"], [])
HOOKS = [
    ("full", [*STORED, "attend"], []),
    ("int4", [*STORED, "attend"], []),
    ("snapkv(budget=0.5, window=4)", [*STORED, "attend"], []),
    H2O,
    (
        "streamingllm(budget=0.5)",
        ["append_token", "rotate_queries_and_keys", "attend", "evict"],
        [],
    ),
    ("quest(budget=0.5, skip_layers=0)", [*STORED, "pick", "attend"], ["flush"]),
    ("kivi(bits=2)", [*STORED, "attend"], ["flush"]),
]


@pytest.mark.parametrize(("text", "hooks", "behind"), sweep(HOOKS, H2O))
def test_a_method_has_the_hooks_that_it_needs(text, hooks, behind, monkeypatch):
    found, end = traced(kvjax.load("recall-tiny"), kvjax.method(text), monkeypatch)
    # Layers that do the same are traced once.
    assert {tuple(name for name, _ in layer) for layer in found} == {tuple(hooks)}
    assert end == behind


@pytest.mark.parametrize(
    "label",
    [r.label if r.label in FIRST else pytest.param(r.label, marks=pytest.mark.rotating) for r in ROWS],
)
def test_every_hook_does_something(label, monkeypatch):
    row = BY_LABEL[label]
    asked = model(row.model)
    layers, _ = traced(kvjax.prepare(asked, row.method()), row.method(), monkeypatch)
    assert layers and not [name for layer in layers for name, changed in layer if not changed]
