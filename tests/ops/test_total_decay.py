"""Log decays of -inf, which a gate at its end gives: all before is forgotten, in results and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.recurrent.linear_attention import gla, hgrn2, hgrn2_gate
from tests.ops.oracles import oracle
from tests.parity.ops_table import OPS
from tests.sweep import sweep

GATED = [name for name in OPS if "g" in oracle(name)[0]]
AT = (1, 2, 20)  # two in a row, and one in another chunk


def results(name):
    """Make a program of the results of both forms, and the gradients of a sum of their squares."""

    def total(inputs):
        found = [OPS[name](inputs, recurrent=recurrent) for recurrent in (False, True)]
        return sum(jnp.square(x).sum() for got in found for x in got.values()), found

    def run(inputs):
        (_, found), gradient = jax.value_and_grad(total, has_aux=True)(inputs)
        return found, gradient

    return jax.jit(run)


@pytest.mark.parametrize("name", sweep(GATED, "gla"))
def test_a_decay_of_minus_infinity_is_a_very_strong_one(name):
    inputs = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), oracle(name)[0])
    run, both = results(name), []
    for decay in (-np.inf, -300.0):
        g = np.array(inputs["g"])
        g[:, AT] = decay
        found, gradient = run(inputs | {"g": jnp.asarray(g)})
        both.append((jax.tree.leaves(found), gradient))
    for got, want in zip(*(jax.tree.leaves(one) for one in both), strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, want, atol=1e-5 * float(np.abs(want).max()))


@pytest.mark.rotating
@pytest.mark.parametrize("heads", [False, True])
def test_what_follows_a_total_decay_is_a_text_of_its_own(rng, heads):
    q, k, v = (rng.normal(size=(2, 40, 2, 4)).astype(np.float32) for _ in range(3))
    g = -rng.random((2, 40, 2) if heads else (2, 40, 2, 4)).astype(np.float32)
    g[:, 11] = -np.inf
    run = jax.jit(gla, static_argnames="recurrent")
    for recurrent in (False, True):
        whole, state = run(q, k, v, g, recurrent=recurrent)
        part, end = run(*(x[:, 11:] for x in (q, k, v, g)), recurrent=recurrent)
        np.testing.assert_allclose(whole[:, 11:], part, atol=1e-5)
        np.testing.assert_allclose(state, end, atol=1e-5)
        first, middle = run(*(x[:, :11] for x in (q, k, v, g)), recurrent=recurrent)
        step, _ = run(*(x[:, 11:12] for x in (q, k, v, g)), initial_state=middle, recurrent=True)
        np.testing.assert_allclose(step, part[:, :1], atol=1e-5)
        np.testing.assert_allclose(whole[:, :11], first, atol=1e-5)


@pytest.mark.rotating
def test_a_gate_without_a_lower_bound_closes_without_nan(rng):
    f = jnp.asarray(rng.normal(size=(1, 6, 1, 3)), jnp.float32).at[0, 2:4].set(-1e4)
    q, v, low = f + 1, 2 * f[..., :2].clip(-3, 3), jnp.zeros((1, 3))

    def total(f, low):
        out, state = hgrn2(q.clip(-3, 3), f, v, low)
        return jnp.square(out).sum() + jnp.square(state).sum()

    for gradient in jax.jit(jax.grad(total, argnums=(0, 1)))(f, low):
        assert np.isfinite(gradient).all()
    # log(lb + (1 - lb) / (1 + exp(-f))) and its derivatives, in float64.
    f, low = np.linspace(-60, 60, 25).reshape(1, 25, 1, 1), np.array([[0.3]])
    for bound in (low, 0 * low):
        x = np.asarray(f)
        want = np.log(bound + (1 - bound) / (1 + np.exp(-x)))
        got = hgrn2_gate(jnp.asarray(f, jnp.float32), jnp.asarray(bound, jnp.float32))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
