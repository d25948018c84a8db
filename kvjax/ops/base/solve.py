"""Many small symmetric positive definite systems at once: exactly, or from products with the matrix alone."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def cholesky_solve(a: Float[Array, "*n K K"], b: Float[Array, "*n K"]) -> Float[Array, "*n K"]:
    """x with A x = b for every leading index; A symmetric positive definite.

    >>> cholesky_solve(4 * jnp.eye(2), jnp.ones(2)).tolist()
    [0.25, 0.25]
    """
    factor = jax.scipy.linalg.cho_factor(jax.lax.stop_gradient(a))

    def run(_: Callable[[Array], Array], b: Array) -> Array:
        return jax.scipy.linalg.cho_solve(factor, b[..., None])[..., 0]

    # Gradients use the same factor again.
    return jax.lax.custom_linear_solve(lambda x: jnp.einsum("...kj,...j->...k", a, x), b, run, symmetric=True)


def conjugate_gradient(
    matvec: Callable[[Array], Array], b: Float[Array, "*n K"], iterations: int
) -> Float[Array, "*n K"]:
    """x with A x = b after a fixed number of conjugate gradient steps from zero (Hestenes and Stiefel, 1952).

    `matvec` takes [*n, K] to the product of every index's own symmetric positive definite matrix. K steps are
    exact but for rounding. Gradients are those of the solution, by another solve of as many steps.

    >>> conjugate_gradient(lambda x: jnp.asarray([1.0, 4.0]) * x, jnp.ones(2), 2).tolist()
    [1.0, 0.25]
    """

    def dot(x: Array, y: Array) -> Array:
        return (x * y).sum(-1, keepdims=True)

    def ratio(x: Array, y: Array) -> Array:
        # Once a system is solved exactly, its residual is 0 and the step would be 0 / 0.
        return x / jnp.where(y > 0, y, 1)

    def run(matvec: Callable[[Array], Array], b: Array) -> Array:
        def body(_: Array, at: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
            x, rest, p, size = at
            product = matvec(p)
            length = ratio(size, dot(p, product))
            x, rest = x + length * p, rest - length * product
            new = dot(rest, rest)
            return x, rest, rest + ratio(new, size) * p, new

        return jax.lax.fori_loop(0, iterations, body, (jnp.zeros_like(b), b, b, dot(b, b)))[0]

    return jax.lax.custom_linear_solve(matvec, b, run, symmetric=True)
