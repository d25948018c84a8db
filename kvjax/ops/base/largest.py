"""The largest numbers of a row, found without sorting it or scanning it number by number."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def largest(x: Float[Array, "*b n"], count: int) -> Bool[Array, "*b n"]:
    """Which `count` numbers of a row have the largest magnitudes; of equals, the first.

    Floats reinterpreted as integers keep the order of their magnitudes. So the threshold is found bit by bit,
    from the highest: a bit is set if `count` numbers are still as large. These passes over rows use whole
    vectors and stay on the devices that hold the rows; a sort of short rows does neither. As in
    `first_largest`, x must not change where it is computed twice.

    >>> import jax.numpy as jnp
    >>> largest(jnp.array([1.0, -4.0, 3.0, -3.0]), 2).tolist()
    [False, True, True, False]
    """
    word = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    size = jax.lax.bitcast_convert_type(jnp.abs(x), word)
    bits = 8 * x.dtype.itemsize - 1  # without the sign

    def set_bit(i: int | Array, least: Array) -> Array:
        tried = least | jnp.left_shift(jnp.ones((), word), jnp.asarray(bits - 1 - i, word))
        enough = (size >= tried[..., None]).sum(-1, dtype=jnp.int32) >= count
        return jnp.where(enough, tried, least)

    least = jax.lax.fori_loop(0, bits, set_bit, jnp.zeros(x.shape[:-1], word))[..., None]
    above, equal = size > least, size == least
    left = count - above.sum(-1, keepdims=True, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal, -1, dtype=jnp.int32) <= left))


def first_largest(x: Float[Array, "*b"], axis: int) -> tuple[Int[Array, "*c"], Float[Array, "*c"]]:
    """Find the index of the largest number along an axis, the first of equals, and that number.

    `jnp.argmax` is one pass in which XLA for CPUs compares number by number; this is two vectorised passes.
    Only for numbers that a compiler cannot round differently where it computes them twice: results of a
    matrix product, or of exact operations on them (a sign, a mask, a power of two).

    >>> import jax.numpy as jnp
    >>> [found.tolist() for found in first_largest(jnp.array([[1.0, 4.0, 4.0]]), -1)]
    [[1], [4.0]]
    """
    most = x.max(axis, keepdims=True)
    at = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis % x.ndim)
    return jnp.where(x == most, at, x.shape[axis] - 1).min(axis), most.squeeze(axis)
