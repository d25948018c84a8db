"""Computation per device on its own parts of arrays: the compiler does not split kernels by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from kvjax.mesh.on_mesh import Axes, OnMesh

T = TypeVar("T")


def specs_of(on: OnMesh | None, axes: Axes, tree: Any) -> Any:
    """Build the partition specs of a tree of arrays with these first axes; None if one device has all."""
    if on is None:
        return None
    return jax.tree.map(lambda x: on.spec((*axes, *(None,) * x.ndim)[: x.ndim], x.shape), tree)


def axes_of_queries(on: OnMesh, lists: int, apart: tuple[str, ...] = (), *, mass: bool) -> Axes | None:
    """Return queries' first axes if every device attends to its own KV heads, or its share of their slots.

    apart: the mesh axes that split slots. mass: whether received attention is summed over heads. None: no
    device has both a KV head and all queries that attend to it.
    """
    if on.splits("kv_heads", lists):
        return "batch", "kv_heads"
    free = not {*on.rules.mesh_axes("heads")} & {*apart}
    if lists == 1 and free and not mass:
        # All query heads attend to the same KV head, so any device may have some of them.
        return "batch", "heads"
    return ("batch", None) if apart or on.devices("heads") == 1 else None


def each_device(
    on: OnMesh | None,
    f: Callable[..., T],
    specs: Sequence[Any],
    out: Any,
    names: tuple[str, ...] | None = None,
) -> Callable[..., T]:
    """Run f on every device, over its own parts of the arguments; out: how the result is split.

    on None: one device has all. names: the mesh axes over which f is mapped, all by default; the compiler
    handles the others.
    """
    if on is None:
        return f
    given = tuple(specs), out
    if names is not None:
        given = jax.tree.map(lambda spec: _along(spec, names), given, is_leaf=_is_spec)
    axes = frozenset(on.mesh.axis_names if names is None else names)
    return jax.shard_map(
        f, mesh=on.mesh, in_specs=given[0], out_specs=given[1], axis_names=axes, check_vma=False
    )


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _along(spec: PartitionSpec, names: tuple[str, ...]) -> PartitionSpec:
    """Return the part of a spec that concerns these mesh axes."""
    return PartitionSpec(*(part if part in (*names, names) else None for part in spec))


def asked_of_one(on: OnMesh | None, f: Callable[..., T], specs: Sequence[Any], args: Sequence[Any]) -> T:
    """Apply f to the shapes of one device's parts; f may use only shapes and dtypes."""
    if on is None:
        return f(*args)
    said: list[T] = []

    def hear(*parts: Any) -> tuple[()]:
        said.append(f(*parts))
        return ()

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tuple(args))
    jax.eval_shape(each_device(on, hear, specs, ()), *shapes)
    return said[0]


def merged_over(
    names: tuple[str, ...], out: Float[Array, "B N T V"], lse: Float[Array, "B N T"]
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:
    """Merge each device's attention over its own slots into attention over those of all devices.

    It takes one maximum and one sum over the devices along these mesh axes. If no device has a visible slot,
    out is 0 and lse is -inf.
    """
    most = jax.lax.pmax(lse, names)
    safe = jnp.where(jnp.isneginf(most), 0.0, most)
    weight = jnp.exp(lse - safe)[..., None]
    both = jax.lax.psum(jnp.concatenate([out.astype(weight.dtype) * weight, weight], -1), names)
    total = both[..., -1]
    merged = both[..., :-1] / jnp.where(total > 0, total, 1.0)[..., None]
    return merged.astype(out.dtype), jnp.where(total > 0, safe + jnp.log(jnp.maximum(total, 1e-37)), -jnp.inf)
