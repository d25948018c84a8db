"""The dtype of states and sums."""

from __future__ import annotations

import functools

import numpy as np
from jaxtyping import Array


def wide(*xs: Array) -> np.dtype:
    """promote(float32, xs): half precisions become float32, float64 stays, even under strict promotion.

    >>> import jax.numpy as jnp
    >>> wide(jnp.zeros(1, jnp.bfloat16)).name
    'float32'
    """
    return functools.reduce(np.promote_types, (x.dtype for x in xs), np.dtype(np.float32))
