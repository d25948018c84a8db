"""Where the arrays of a run are on a mesh: weights and optimiser state, by the mesh's rules."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from kvjax.mesh.on_mesh import OnMesh
from kvjax.models.axes import param_shardings
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.placement import leaves


def places(tree: Any, params: Params, config: Config, on: OnMesh) -> Any:
    """Return the sharding of every array of `tree`: that of the parameter its path ends in, else replicated.

    So optimiser state is sharded like its parameter; `tree` and `params` may hold shapes.
    """
    known = dict(leaves(param_shardings(params, config, on)))
    shapes = {path: x.shape for path, x in leaves(params)}

    def place(path: Any, x: Any) -> jax.sharding.NamedSharding:
        words = [str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", "")))) for k in path]
        for name in (".".join(words[-3:]), words[-1]):
            if name in known and shapes[name] == x.shape:
                return known[name]
        return on.sharding((None,) * x.ndim, x.shape)

    return jax.tree.map_with_path(place, tree)


def rows_placed(x: np.ndarray, on: OnMesh | None) -> jax.Array:
    """Rows in parts [A, B, ...], sharded over the devices, or replicated if they do not divide."""
    if on is None:
        return jax.numpy.asarray(x)
    where = on.sharding((None, "batch", *[None] * (x.ndim - 2)), x.shape)
    return jax.make_array_from_callback(x.shape, where, lambda index: x[index])
