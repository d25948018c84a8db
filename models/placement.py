"""Names of the parameters' leaves, and on which devices each of them goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax

from kvjax.errors import InputError
from kvjax.models.layers import Params


def map_leaves(f: Callable[[str, Any], Any], tree: Params, below: str = "") -> Params:
    """The tree with f(path, leaf) at every leaf; paths read "embed" or "layers.0.q" (0: the group).

    A tree in the tree, such as one of two decoders, puts its name before its paths: "blocks.layers.0.q".
    """
    out: Params = {}
    for name, leaf in tree.items():
        path = f"{below}{name}"
        if name == "layers":
            out[name] = tuple(map_leaves(f, group, f"{path}.{g}.") for g, group in enumerate(leaf))
        else:
            out[name] = map_leaves(f, leaf, f"{path}.") if isinstance(leaf, dict) else f(path, leaf)
    return out


def leaves(tree: Params) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf."""
    found: list[tuple[str, Any]] = []
    map_leaves(lambda path, leaf: found.append((path, leaf)), tree)
    return found


def placement(tree: Params, sharding: Any) -> Callable[[str, tuple[int, ...]], jax.sharding.Sharding | None]:
    """A user's `sharding` as a function (path, shape) -> Sharding, None for the default device.

    It may be None, one Sharding for all, such a function, or a tree of Shardings like `tree`; InputError
    where that tree has none for a parameter.
    """
    if sharding is None or isinstance(sharding, jax.sharding.Sharding):
        return lambda path, shape: sharding
    if callable(sharding):
        return cast(Callable, sharding)
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
