"""Batches of small linear systems: positive definite, triangular, or anything that LAPACK solves."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# On CPUs jaxlib 0.10 splits LAPACK's work on many matrices among the threads that run the program, and the
# calling thread waits. If all threads call it at once, all wait for ever. Later versions do not split it.
_WAITS = jax.__version_info__ < (0, 11)


def one_by_one(f: Callable[..., Array], *xs: Float[Array, "*n _ _"]) -> Float[Array, "..."]:
    """Apply f, which calls LAPACK, to n matrices; on CPUs one by one if threads could deadlock.

    >>> one_by_one(jnp.linalg.inv, jnp.array([[[2.0]], [[4.0]]])).tolist()
    [[[0.5]], [[0.25]]]
    """
    lead = xs[0].shape[:-2]
    if not _WAITS or not lead:
        return f(*xs)

    def each(*xs: Array) -> Array:
        found = jax.lax.map(lambda one: f(*one), tuple(x.reshape(-1, *x.shape[-2:]) for x in xs))
        return found.reshape(*lead, *found.shape[1:])

    return jax.lax.platform_dependent(*xs, cpu=each, default=f)


def cholesky_solve(a: Float[Array, "*n K K"], b: Float[Array, "*n K"]) -> Float[Array, "*n K"]:
    """Solve A x = b for every leading index, with A symmetric positive definite.

    >>> cholesky_solve(4 * jnp.eye(2), jnp.ones(2)).tolist()
    [0.25, 0.25]
    """
    factor = one_by_one(lambda x: jax.scipy.linalg.cholesky(x, lower=True), jax.lax.stop_gradient(a))

    def run(_: Callable[[Array], Array], b: Array) -> Array:
        solved = one_by_one(lambda c, x: jax.scipy.linalg.cho_solve((c, True), x), factor, b[..., None])
        return solved[..., 0]

    # Gradients reuse the factorisation.
    return jax.lax.custom_linear_solve(lambda x: jnp.einsum("...kj,...j->...k", a, x), b, run, symmetric=True)


def unit_lower_solve(below: Float[Array, "*n C C"], b: Float[Array, "*n C V"]) -> Float[Array, "*n C V"]:
    """Solve (I + L) x = b for every leading index, where L is the strictly lower part of `below`.

    The inverse of a block is built from the inverses A' of A and D' of D, its halves on the diagonal:
    [[A, 0], [B, D]]^-1 = [[A', 0], [-D' B A', D']]. This takes matrix products alone and is as exact as
    substitution row by row. Nothing calls LAPACK, so nothing needs `one_by_one`.

    >>> unit_lower_solve(jnp.array([[0.0, 0.0], [3.0, 0.0]]), jnp.array([[1.0], [5.0]])).tolist()
    [[1.0], [2.0]]
    """
    below = jnp.tril(below, -1)
    inverse = _unit_lower_inverse(jax.lax.stop_gradient(below))

    def times(a: Array, x: Array) -> Array:
        return jnp.matmul(a, x, precision=jax.lax.Precision.HIGHEST)

    # Gradients reuse the inverse.
    return jax.lax.custom_linear_solve(
        lambda x: x + times(below, x),
        b,
        lambda _, b: times(inverse, b),
        lambda _, b: times(jnp.swapaxes(inverse, -1, -2), b),
    )


def _unit_lower_inverse(below: Float[Array, "*n C C"]) -> Float[Array, "*n C C"]:
    """Invert I + below for strictly lower matrices, from blocks of one row up to the whole."""
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
    """Solve A x = b by a fixed number of conjugate gradient steps from zero (Hestenes and Stiefel, 1952).

    `matvec` multiplies each vector of [*n, K] by its own symmetric positive definite matrix. K steps are
    exact except for rounding. Gradients are those of the solution, by another solve of as many steps.

    >>> conjugate_gradient(lambda x: jnp.asarray([1.0, 4.0]) * x, jnp.ones(2), 2).tolist()
    [1.0, 0.25]
    """

    def dot(x: Array, y: Array) -> Array:
        return (x * y).sum(-1, keepdims=True)

    def ratio(x: Array, y: Array) -> Array:
        # Once a system is solved exactly, its residual is 0 and the step size would be 0 / 0.
        return x / jnp.where(y > 0, y, 1)

    def run(matvec: Callable[[Array], Array], b: Array) -> Array:
        def body(_: int | Array, at: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
            x, rest, p, size = at
            product = matvec(p)
            length = ratio(size, dot(p, product))
            x, rest = x + length * p, rest - length * product
            new = dot(rest, rest)
            return x, rest, rest + ratio(new, size) * p, new

        return jax.lax.fori_loop(0, iterations, body, (jnp.zeros_like(b), b, b, dot(b, b)))[0]

    return jax.lax.custom_linear_solve(matvec, b, run, symmetric=True)
