"""Systems of equations: both ways against numpy, in values and in gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.ops.base.solve import cholesky_solve, conjugate_gradient
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
