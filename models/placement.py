"""Placement: names of the parameters' leaves, their devices, and their memory layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

from kvjax.base.errors import InputError
from kvjax.models.layers import Params
from kvjax.models.stacking import layers_of_groups, members
from kvjax.pallas_kernels.block_sizes import GENERATIONS

# Rows of the tiles in which stacked bfloat16 matrices are multiplied, if not the default of 8.
TILE_ROWS = {"tpu7x": 16}


def map_leaves(f: Callable[[str, Any], Any], tree: Params, below: str = "") -> Params:
    """Apply f(path, leaf) to every leaf of the tree; paths: "embed", "layers.0.q" (0: the group's number).

    Paths in a nested tree, such as one of two decoders, begin with its name: "blocks.layers.0.q".
    """
    out: Params = {}
    for name, leaf in tree.items():
        path = f"{below}{name}"
        if name == "layers":
            out[name] = _mapped_layers(f, leaf, path)
        else:
            out[name] = map_leaves(f, leaf, f"{path}.") if isinstance(leaf, dict) else f(path, leaf)
    return out


def _mapped_layers(f: Callable[[str, Any], Any], layers: Any, path: str) -> tuple[Any, ...]:
    """`map_leaves` of every group; the groups of a pattern are numbered as if they stood alone."""
    out: list[Any] = []
    number = 0
    for entry in layers:
        groups = tuple(map_leaves(f, p, f"{path}.{number + i}.") for i, p in enumerate(members(entry)))
        out.append(groups[0] if isinstance(entry, Mapping) else groups)
        number += len(groups)
    return tuple(out)


def leaves(tree: Params) -> list[tuple[str, Any]]:
    """Return (path, leaf) of every leaf."""
    found: list[tuple[str, Any]] = []
    map_leaves(lambda path, leaf: found.append((path, leaf)), tree)
    return found


def placement(tree: Params, sharding: Any) -> Callable[[str, tuple[int, ...]], jax.sharding.Sharding | None]:
    """Make a user's `sharding` a function (path, shape) -> Sharding, None for the default device.

    It may be None, one Sharding for all, such a function, or a tree of Shardings like `tree`. InputError for
    anything else, if that tree lacks a parameter, and if a Sharding does not divide its shape.
    """
    choose = _chosen(tree, sharding)

    def place(path: str, shape: tuple[int, ...]) -> jax.sharding.Sharding | None:
        where = choose(path, shape)
        if where is None:
            return None
        if not isinstance(where, jax.sharding.Sharding):
            raise InputError(f"the sharding of {path} is {where!r}, {_EXPECTED}")
        try:
            where.shard_shape(shape)
        except (ValueError, IndexError) as error:  # an IndexError if it names more axes than there are
            raise InputError(
                f"{path} of shape {list(shape)} cannot be divided as {where}: leave that axis whole, or give "
                "a function (path, shape) -> Sharding that does"
            ) from error
        return where

    return place


_EXPECTED = (
    "expected a jax.sharding.Sharding: write jax.sharding.NamedSharding(mesh, "
    "jax.sharding.PartitionSpec(...)), where an empty PartitionSpec() means a copy on every device"
)


def _chosen(tree: Params, sharding: Any) -> Callable[[str, tuple[int, ...]], Any]:
    """`placement` before its results are checked."""
    if sharding is None or isinstance(sharding, jax.sharding.Sharding):
        return lambda path, shape: sharding
    if isinstance(sharding, jax.sharding.Mesh | jax.sharding.PartitionSpec | str):
        raise InputError(f"sharding is a {type(sharding).__name__}, {_EXPECTED}")
    if callable(sharding):
        return cast(Callable, sharding)
    if isinstance(sharding, dict) and isinstance(sharding.get("layers"), tuple | list):
        sharding = sharding | {"layers": layers_of_groups(sharding)}
    given = {
        ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys): leaf
        for keys, leaf in jax.tree.leaves_with_path(sharding)
    }
    absent = [path for path, _ in leaves(tree) if path not in given]
    if absent:
        raise InputError(
            f"the tree of shardings has none for {', '.join(absent[:8])}: give one for every parameter"
        )
    return lambda path, shape: given[path]


def weight_layout(generation: str, x: Any) -> Layout | None:
    """Choose the layout of the layers' matrices x [..., D, F] on a TPU; None for the default.

    With other tiles, XLA would copy the matrices of all layers at every call.

    >>> weight_layout("tpu7x", jax.ShapeDtypeStruct((8, 256, 512), jnp.bfloat16)).tiling
    ((16, 128), (2, 1))
    """
    rows = TILE_ROWS.get(generation)
    if rows is None or x.ndim < 3 or x.shape[-2] < rows or x.dtype != jnp.bfloat16:
        return None
    return Layout(tuple(range(x.ndim)), tiling=((rows, 128), (2, 1)))


def laid_out(x: jax.Array) -> jax.Array:
    """Move x to its devices, in the layout in which it is multiplied."""
    kind = next(iter(x.devices())).device_kind
    layout = weight_layout(GENERATIONS.get(kind, ""), x)
    return x if layout is None else jax.device_put(x, Format(layout, x.sharding))
