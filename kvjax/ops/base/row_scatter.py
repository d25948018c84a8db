"""Writes rows of an array in place."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped


def scatter_rows(
    x: Shaped[Array, "R *r"], at: Int[Array, "n"], rows: Shaped[Array, "n *r"], *, unique: bool = False
) -> Shaped[Array, "R *r"]:
    """Write x[at[i]] = rows[i]; an index of R or more writes nothing. unique: no two are equal.

    A scatter of a single row gets a second one that writes nothing: otherwise XLA turns it into a slice,
    reads the old row to write it back if the index is outside, and on CPUs copies all of x for that.

    >>> x = jnp.zeros((3, 2))
    >>> scatter_rows(x, jnp.asarray([1]), jnp.ones((1, 2))).tolist()
    [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    >>> bool((scatter_rows(x, jnp.asarray([3]), jnp.ones((1, 2))) == x).all())
    True
    """
    if len(at) == 1:
        at = jnp.concatenate([at, jnp.full_like(at, np.iinfo(at.dtype).max)])
        rows = jnp.repeat(rows, 2, 0)
    return x.at[at].set(rows, mode="drop", unique_indices=unique)
