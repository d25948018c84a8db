"""Many small systems at once: symmetric positive definite, or triangular with ones on the diagonal."""

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


def unit_lower_solve(below: Float[Array, "*n C C"], b: Float[Array, "*n C V"]) -> Float[Array, "*n C V"]:
    """x with (I + L) x = b for every leading index, where L is the strictly lower part of `below`.

    An inverse is made of those of its halves, [[A, 0], [B, D]]^-1 = [[A', 0], [-D' B A', D']], so all is
    products, and as exact as substitution row by row. It takes the place of LAPACK's solver, because in
    jaxlib 0.10 on CPUs two of those that run at once may wait for each other's threads for ever.

    >>> unit_lower_solve(jnp.array([[0.0, 0.0], [3.0, 0.0]]), jnp.array([[1.0], [5.0]])).tolist()
    [[1.0], [2.0]]
    """
    below = jnp.tril(below, -1)
    inverse = _unit_lower_inverse(jax.lax.stop_gradient(below))

    def times(a: Array, x: Array) -> Array:
        return jnp.matmul(a, x, precision=jax.lax.Precision.HIGHEST)

    # Gradients use the same inverse again.
    return jax.lax.custom_linear_solve(
        lambda x: x + times(below, x),
        b,
        lambda _, b: times(inverse, b),
        lambda _, b: times(jnp.swapaxes(inverse, -1, -2), b),
    )


def _unit_lower_inverse(below: Float[Array, "*n C C"]) -> Float[Array, "*n C C"]:
    """(I + below)^-1 of strictly lower matrices, from blocks of one row up to all."""
    c = below.shape[-1]
    size, most = 1, 1 << max(c - 1, 0).bit_length()
    padded = jnp.pad(below, [(0, 0)] * (below.ndim - 2) + [(0, most - c)] * 2)
    inverse = jnp.ones((*below.shape[:-2], most, 1, 1), below.dtype)  # of the blocks on the diagonal
    while size < most:
        pairs = most // (2 * size)
        blocks = padded.reshape(*below.shape[:-2], pairs, 2, size, pairs, 2, size)[..., 1, :, :, 0, :]
        left, right = (inverse.reshape(*below.shape[:-2], pairs, 2, size, size)[..., i, :, :] for i in (0, 1))
        corner = -jnp.einsum(
            "...pij,...pjpk,...pkl->...pil", right, blocks, left, precision=jax.lax.Precision.HIGHEST
        )
        upper = jnp.concatenate([left, jnp.zeros_like(left)], -1)
        inverse = jnp.concatenate([upper, jnp.concatenate([corner, right], -1)], -2)
        size *= 2
    return inverse[..., 0, :c, :c]


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
