"""Bases that minimise the error of codes, by gradient descent with straight-through rounding (FlatQuant)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from kvjax.store.rotate import hadamard

STEPS, RATE, ROWS = 200, 1e-2, 1024


def flat(x: Float[np.ndarray, "L K T H"], bits: int, clip: float) -> dict[str, np.ndarray]:
    """The matrices [L, K, H, H] in whose basis quantisation loses least, and inverses; equal in all heads.

    M^-1 = R Q diag(e^s), for an initial Hadamard matrix R, an orthogonal Q by Cayley's map of a
    skew-symmetric matrix, and scales. `STEPS` steps of Adam minimise the squared error of rows decoded from
    codes of `bits` bits between `clip` times a row's minimum and maximum, relative to the rows' squares.
    """
    layers, heads, tokens, width = x.shape
    rows = x.reshape(layers, heads * tokens, width)
    drawn = np.random.RandomState(0).permutation(heads * tokens)[:ROWS]
    start = jnp.asarray(hadamard(width, 0), jnp.float32)
    matrix, inverse = _learnt(jnp.asarray(rows[:, drawn], jnp.float32), start, bits, clip)
    each = {"matrix": matrix, "inverse": inverse}
    return {name: np.repeat(np.asarray(y)[:, None], heads, 1) for name, y in each.items()}


@partial(jax.jit, static_argnames=("bits", "clip"))
def _learnt(
    rows: Float[Array, "L R H"], start: Float[Array, "H H"], bits: int, clip: float
) -> tuple[Float[Array, "L H H"], Float[Array, "L H H"]]:
    layers, _, width = rows.shape
    optimiser = optax.adam(RATE)
    first = jnp.zeros((layers, width, width)), jnp.zeros((layers, width))

    def loss(params: tuple[Array, Array]) -> Array:
        matrix, inverse = jax.vmap(partial(basis, start))(*params)
        z = jnp.matmul(rows, inverse, precision="highest")
        back = jnp.matmul(rounded(z, bits, clip), matrix, precision="highest")
        return (jnp.square(back - rows).sum((1, 2)) / jnp.square(rows).sum((1, 2))).sum()

    def step(held: tuple, _: None) -> tuple[tuple, Array]:
        params, state, best = held
        value, slope = jax.value_and_grad(loss)(params)
        better = value < best[0]
        best = jax.tree.map(lambda new, old: jnp.where(better, new, old), (value, params), best)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of an integer step
            updates, state = optimiser.update(slope, state)
        return (optax.apply_updates(params, updates), state, best), value

    begun = (first, optimiser.init(first), (jnp.float32(jnp.inf), first))
    (_, _, (_, params)), _ = jax.lax.scan(step, begun, None, STEPS)
    return jax.vmap(partial(basis, start))(*params)


def basis(
    start: Float[Array, "H H"], skew: Float[Array, "H H"], scales: Float[Array, "H"]
) -> tuple[Float[Array, "H H"], Float[Array, "H H"]]:
    """M = diag(e^-s) Q' R' and M^-1 = R Q diag(e^s), with Q = (1 - A) (1 + A)^-1 for A = S - S'."""
    a, one = skew - skew.T, jnp.eye(len(skew), dtype=skew.dtype)
    turn = jnp.matmul(start, jnp.linalg.solve(one + a, one - a), precision="highest")
    return jnp.exp(-scales)[:, None] * turn.T, turn * jnp.exp(scales)[None]


def rounded(z: Float[Array, "*b H"], bits: int, clip: float) -> Float[Array, "*b H"]:
    """Encodes and decodes by `Affine(bits, clip=clip)`, ranges in float32; straight-through gradient."""
    low, high = clip * z.min(-1, keepdims=True), clip * z.max(-1, keepdims=True)
    step = (high - low) / (2**bits - 1)
    step = jnp.where(step > 0, step, 1.0)
    code = (z - low) / step
    whole = code + jax.lax.stop_gradient(jnp.round(code) - code)
    return jnp.clip(whole, 0, 2**bits - 1) * step + low
