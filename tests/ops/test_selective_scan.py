"""Mamba's selective scan: against its equation in numpy, however it is cut, packed or masked."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.recurrent import selective_scan as module
from tests.ops import rows

B, T, D, N = 2, rows.T, 5, 3
A, SKIP = -np.random.default_rng(1).random((D, N)) - 0.1, np.random.default_rng(2).normal(size=D)


def run(x, **how):
    # Outputs [B, T, D] with a last axis more, as the checks have it.
    a, skip = (jnp.asarray(y, x["v"].dtype) for y in (A, SKIP))
    out, state = module.selective_scan(x["v"][..., 0], x["dt"], a, x["b"], x["c"], skip, **how)
    return out[..., None], state


def row(x, state):
    h, out = np.zeros((D, N)) if state is None else state, []
    for v, dt, b, c in zip(x["v"][..., 0], x["dt"], x["b"], x["c"], strict=True):
        h = np.exp(dt[:, None] * A) * h + (dt * v)[:, None] * b
        out.append(h @ c + SKIP * v)
    return np.reshape(out, (-1, D, 1)), h


@pytest.fixture(params=["cpu", "tpu"], autouse=True)
def form(request, monkeypatch):
    """Tokens one after the other, as on CPUs, and all states of a chunk at once, as elsewhere."""
    monkeypatch.setattr(module, "platform", lambda: request.param)


@pytest.fixture
def tokens(rng):
    x = {"v": rng.normal(size=(B, T, D, 1)), "dt": rng.random((B, T, D))}
    return x | {n: rng.normal(size=(B, T, N)) for n in "bc"}, rng.normal(size=(B, D, N))


def test_packed_rows_with_holes_are_their_equation(tokens):
    rows.check_packed_rows(run, row, *tokens)


@pytest.mark.rotating
def test_any_cut_is_the_whole_and_steps_are_too(tokens):
    rows.check_cuts(run, row, *tokens, step=lambda x, **how: run(x, recurrent=True, **how))


@pytest.mark.rotating
def test_gradients_are_those_of_single_steps_also_under_strong_decay(tokens):
    x, state = tokens
    strong = x | {"dt": np.where(x["dt"] > 0.5, 100.0, x["dt"])}
    rows.check_gradients(run, lambda x, **how: run(x, recurrent=True, **how), strong, state)
