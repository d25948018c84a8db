"""Arrays that are split over the devices of several processes, fetched whole by each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree


def fetch(tree: PyTree) -> PyTree:
    """Bring the arrays of a tree to this host, whole.

    Args:
        tree: any pytree, such as a cache or logits. If other processes hold parts of its arrays, all
            processes must call this.

    Returns:
        The same tree of NumPy arrays.

    >>> import jax.numpy as jnp
    >>> fetch({"logits": jnp.zeros((1, 2))})["logits"].tolist()
    [[0.0, 0.0]]
    """
    return jax.device_get(jax.tree.map(_within_reach, tree))


def _within_reach(x: Any) -> Any:
    if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
        return multihost_utils.process_allgather(x, tiled=True)
    return x


def from_pieces(
    shape: Sequence[int], where: jax.sharding.Sharding, read: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
    """Build an array of which every process reads only the pieces that its devices hold, each piece once.

    >>> from_pieces((4,), jax.sharding.SingleDeviceSharding(jax.devices()[0]), np.arange(4).__getitem__).shape
    (4,)
    """
    found: dict[Any, np.ndarray] = {}

    def piece(index: Any) -> np.ndarray:
        key = tuple(s.indices(n) for s, n in zip(index, shape, strict=True))
        if key not in found:
            found[key] = read(index)
        return found[key]

    return jax.make_array_from_callback(tuple(shape), where, piece)


def is_shared(tree: PyTree) -> bool:
    """Whether any array of a tree is partly on devices of other processes: then all must compute with it.

    >>> import jax.numpy as jnp
    >>> is_shared(jnp.zeros(2))
    False
    """
    return any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in jax.tree.leaves(tree))
