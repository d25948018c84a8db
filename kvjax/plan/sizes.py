"""Sizes of weights and caches on a mesh: shapes with shardings, and the bytes on every device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.grammar import Method
from kvjax.mesh.on_mesh import Axes, OnMesh
from kvjax.mesh.rules import Rules
from kvjax.models.axes import weight_shardings
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.params import plan, shapes
from kvjax.models.placement import map_leaves
from kvjax.ops.base.memory import KIND
from kvjax.plan.layouts import abstract, parts_of_lists
from kvjax.plan.topologies import Topology
from kvjax.state.axes import map_axes
from kvjax.state.cache import Cache, lies_far
from kvjax.steps import Run, prefill

# How many of a cache's slots are left for new tokens.
ROOM = 128


class ShapeAndAxes(NamedTuple):
    """An array's shape with its logical axes."""

    shape: tuple[int, ...]
    dtype: Any
    axes: Axes

    def of_rows(self, batch: int) -> ShapeAndAxes:
        """Return the array of one row of a cache with `batch` rows."""
        sizes = zip(self.axes, self.shape, strict=True)
        return self._replace(shape=tuple(batch * n if a == "batch" else n for a, n in sizes))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * bits(self.dtype) // 8


def bits(dtype: Any) -> int:
    """How many bits a number takes on a device.

    >>> bits(jnp.int4), bits(jnp.bfloat16), bits(bool)
    (4, 16, 8)
    """
    kind = jnp.dtype(dtype)
    if kind == jnp.bool_:
        return 8
    return (jnp.iinfo if jnp.issubdtype(kind, jnp.integer) else jnp.finfo)(kind).bits


def on_device(shape: Sequence[int], dtype: Any, spec: Any, mesh: Any) -> int:
    """Bytes of an array on one device of a mesh that splits it by `spec`."""
    parts = 1
    for names in spec:
        for name in (names,) if isinstance(names, str) else names or ():
            parts *= mesh.shape[name]
    return math.prod(shape) // parts * bits(dtype) // 8


def weights(config: Config, topology: Topology, dtype: Any) -> Params:
    """Shapes of all parameters, stacked as on that topology's devices."""
    tree = shapes(config, plan(config, stacked=topology.stacked))
    return map_leaves(lambda _, shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), tree)


def placed_weights(config: Config, params: Params, topology: Topology, on: OnMesh) -> Params:
    """Return the same weights with shardings; InputError if the model cannot be split so."""
    place = weight_shardings(config, plan(config, stacked=topology.stacked), on)

    def put(path: str, x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(path, x.shape))

    return map_leaves(put, params)


def placed_cache(cache: Cache, on: OnMesh) -> Cache:
    """Return a cache's shapes with shardings."""

    def put(axes: Axes, x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on.sharding(axes, x.shape))

    def send(x: Any, far: bool) -> Any:
        where = x.sharding.with_memory_kind(KIND) if far else x.sharding
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    placed = map_axes(put, cache, on)
    return jax.tree.map(send, placed, lies_far(placed))


def tree_bytes(tree: Any) -> int:
    """Bytes of sharded arrays on one device, except those in host memory."""
    here = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind != KIND]
    return sum(on_device(x.shape, x.dtype, x.sharding.spec, x.sharding.mesh) for x in here)


def cache_shapes(
    run: Run, params: Params, batch: int, context: int, mesh: Any, room: int | None = None
) -> Cache:
    """Shapes of the cache that a prefill leaves, with slots for `context` tokens of each of `batch` rows.

    mesh: the devices for which it is traced, because capacities depend on them.
    """
    room = min(ROOM, context // 2) if room is None else room
    tokens = jax.ShapeDtypeStruct((batch, context - room), jnp.int32)
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
    fill = partial(prefill, run, tokens_bound=context - room, room=room, compress=True)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.eval_shape(lambda p, t, n: fill(p, t, n, None), params, tokens, lengths)[1]


class DeviceSizes:
    """Bytes on a device of a model's weights, and of a method's caches at any batch and context.

    A cache is traced once per context and number of devices that share a KV head's slots, for one row, since
    its arrays grow with rows. Pools are rounded to whole pages, and traced for all rows.
    """

    def __init__(self, config: Config, method: Method, topology: Topology, dtype: Any):
        self.config, self.method, self.topology, self.dtype = config, method, topology, dtype
        self.params = weights(config, topology, dtype)
        self._cache = lru_cache(maxsize=None)(self._trace)

    def weights(self, on: OnMesh) -> int:
        """Bytes of all weights. InputError if the model cannot be split so."""
        return tree_bytes(placed_weights(self.config, self.params, self.topology, on))

    def host(self, on: OnMesh, batch: int, context: int) -> int:
        """Bytes of that cache in the host memory of a device."""
        return self.cache(on, batch, context, far=True)

    def cache(self, on: OnMesh, batch: int, context: int, roughly: bool = False, far: bool = False) -> int:
        """Bytes per device of a cache with slots for `context` tokens in each of `batch` rows.

        roughly: does not round slots up to equally many on each device that shares a KV head, which saves
        traces. far: bytes in host memory instead.
        """
        return sum(
            on_device(one.shape, one.dtype, on.spec(one.axes, one.shape), on.mesh)
            for one in self.spread(on, batch, context, roughly, far)
        )

    def spread(
        self, on: OnMesh, batch: int, context: int, roughly: bool = False, far: bool = False
    ) -> list[ShapeAndAxes]:
        """Every array of a cache, whole, with its logical axes; without bytes if in the other memory."""
        key = context, 1 if roughly else parts_of_lists(self.config, on), min(on.mesh.size, 2)
        cache, times = self._cache(*key, 1), batch
        if cache.pools:
            cache, times = self._cache(*key, batch), 1
        found: list[ShapeAndAxes] = []
        # Shapes do not say in which memory arrays are.
        cache = jax.tree.map(lambda x, there: x if there == far else _none(x), cache, lies_far(cache))
        map_axes(lambda axes, x: found.append(ShapeAndAxes(x.shape, x.dtype, axes).of_rows(times)), cache, on)
        return found

    def _trace(self, context: int, parts: int, devices: int, rows: int) -> Cache:
        # Capacities depend on the kind of device, whether there are several, and how many share a KV head.
        mesh = {"x": max(parts, devices)}
        on = abstract(self.topology, mesh, Rules(slots="x") if parts > 1 else Rules())
        run = Run(self.config, self.method, None, on if parts > 1 else None)
        return cache_shapes(run, self.params, rows, context, on.mesh)


def _none(x: Any) -> Any:
    """Make an array without bytes, with the axes of another."""
    return jax.ShapeDtypeStruct((0,) * len(x.shape), x.dtype)
