"""Systems of equations: both ways against numpy, in values and in gradients."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.grammar import Budget
from kvjax.ops.base.solve import cholesky_solve, conjugate_gradient, unit_lower_solve
from kvjax.read.narrow_keys import PrincipalKeys
from kvjax.train.conversion.low_rank import rotated
from tests.ops.oracles import rms

N, K = (3, 2), 5


def draw(rng):
    x = rng.normal(size=(*N, 9, K))
    a, b = np.einsum("...nk,...nj->...kj", x, x) + np.eye(K), rng.normal(size=(*N, K))
    return jnp.asarray(a), jnp.asarray(b)


def by_products(a, b, steps):
    return conjugate_gradient(lambda x: jnp.einsum("...kj,...j->...k", a, x), b, steps)


def test_both_ways_solve_every_system(rng):
    with jax.enable_x64(True):
        a, b = draw(rng)
        want = np.linalg.solve(a, np.asarray(b)[..., None])[..., 0]
        assert rms(cholesky_solve(a, b), want) < 1e-12
        assert rms(jax.jit(by_products, static_argnums=2)(a, b, 2 * K), want) < 1e-12
        assert rms(jax.jit(by_products, static_argnums=2)(a, b, 2), want) > 1e-3


def test_steps_beyond_the_solution_change_nothing(rng):
    # A multiple of one matrix is solved by the first step; zero has nothing to solve.
    a, b = jnp.broadcast_to(3 * jnp.eye(K)[None], (2, K, K)), jnp.asarray([[0.0] * K, [6.0] * K])
    np.testing.assert_allclose(by_products(a, b, 50), b / 3, rtol=1e-6)


def test_gradients_are_those_of_the_solution(rng):
    with jax.enable_x64(True):
        a, b = draw(rng)
        weights = jnp.asarray(rng.normal(size=b.shape))

        def grads(solve):
            # A symmetric matrix says nothing of how its two halves share a gradient.
            loss = lambda a, b: (solve((a + jnp.swapaxes(a, -1, -2)) / 2, b) * weights).sum()  # noqa: E731
            return jax.jit(jax.grad(loss, argnums=(0, 1)))(a, b)

        inverse = np.linalg.inv(a)
        to_b = np.einsum("...kj,...k->...j", inverse, weights)
        x = np.einsum("...kj,...j->...k", inverse, b)
        to_a = -np.einsum("...k,...j->...kj", to_b, x)
        to_a = (to_a + np.swapaxes(to_a, -1, -2)) / 2
        for solve in (cholesky_solve, lambda a, b: by_products(a, b, 2 * K)):
            for got, want in zip(grads(solve), (to_a, to_b), strict=True):
                assert rms(got, want) < 1e-10


def lower(size, rng):
    """Systems that grow no vector, as chunks of the delta rule have."""
    below, b = rng.normal(size=(*N, size, size)), rng.normal(size=(*N, size, 3))
    below /= np.abs(np.tril(below, -1)).sum(-1, keepdims=True) + 1
    system = np.tril(below, -1) + np.eye(size)
    return below, b, system, np.linalg.solve(system, b)


@pytest.mark.rotating
@pytest.mark.parametrize("size", [1, 6, pytest.param(64, marks=pytest.mark.rotating)])
def test_lower_systems_are_solved_as_substitution_does(size, rng):
    below, b, _, want = lower(size, rng)
    x = unit_lower_solve(jnp.asarray(below, jnp.float32), jnp.asarray(b, jnp.float32))
    assert rms(x, want) < 1e-6


@pytest.mark.rotating
def test_slopes_of_lower_systems_are_those_of_the_equations(rng):
    """Of sum(c x): c' dx = -u' dL x + u' db with u = (I + L)^-T c."""
    below, b, system, want = lower(6, rng)
    c = rng.normal(size=b.shape)
    with jax.enable_x64(True):
        got = jax.grad(lambda a, b: (c * unit_lower_solve(a, b)).sum(), (0, 1))(*map(jnp.asarray, (below, b)))
    u = np.linalg.solve(system.swapaxes(-1, -2), c)
    assert rms(got[1], u) < 1e-12
    assert rms(got[0], np.tril(-u @ want.swapaxes(-1, -2), -1)) < 1e-12


@pytest.mark.rotating
def test_equal_directions_lose_no_digits():
    """Powers of such a matrix have entries of 1e18, and its inverse none beyond 1."""
    ones = np.ones((1, 64, 64))
    b = np.arange(64.0)[None, :, None]
    x = unit_lower_solve(jnp.asarray(ones, jnp.float32), jnp.asarray(b, jnp.float32))
    assert rms(x, np.linalg.solve(np.tril(ones, -1) + np.eye(64), b)) < 1e-6


CALLERS = {
    "cholesky": lambda a: cholesky_solve(a, a[..., 0]),
    "gradients": jax.grad(lambda a: cholesky_solve(a, a[..., 0]).sum()),
    "learnt bases": jax.grad(lambda a: rotated(a, a).sum()),
    "principal keys": lambda a: PrincipalKeys(Budget(0.5)).learn(a, jnp.zeros(a.shape[:-1], jnp.int32)),
}


@pytest.mark.rotating
@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="later jaxlib does not split LAPACK's work")
@pytest.mark.parametrize("name", CALLERS)
def test_lapack_is_given_one_matrix_at_a_time_on_cpus(name):
    given = jnp.broadcast_to(jnp.eye(K), (*N, K, K))
    text = jax.jit(CALLERS[name]).lower(given).compile().as_text()
    calls = [line.split("custom-call")[0] for line in text.splitlines() if '"lapack_' in line]
    assert calls
    # What comes back of it: matrices, vectors and numbers, none of a row of them.
    assert all(shape.count(",") <= 1 for line in calls for shape in re.findall(r"f32\[([\d,]*)\]", line))
