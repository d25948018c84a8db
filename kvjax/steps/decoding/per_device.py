"""Kernels of a decode step on a mesh: every device attends to its own KV heads, or its share of slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from kvjax.mesh.on_mesh import Axes, OnMesh
from kvjax.mesh.per_device import asked_of_one, axes_of_queries, each_device, merged_over, specs_of
from kvjax.state.axes import lie_apart, specs_of_slots
from kvjax.state.cache import Slots

T = TypeVar("T")
# out and lse [B, N, ...], and the mass of slots [B, K, S] if needed.
Found = tuple[Array, Array, Array | None]


class MeshSplit(NamedTuple):
    """How a segment of stacked layers is sharded on a mesh.

    queries: the first axes of queries. apart: the mesh axes over which the slots of a KV head are split, if
    any.
    """

    on: OnMesh
    queries: Axes
    apart: tuple[str, ...]

    def specs(self, slots: Slots, q: Array) -> list[Any]:
        """Build the partition specs of slots and of queries [B, N, ...]."""
        return [specs_of_slots(slots, self.on), specs_of(self.on, self.queries, q)]

    def of_lists(self, *lists: Any) -> list[Any]:
        """Build the partition specs of arrays [B, K, ...]; scalars are replicated."""
        return [specs_of(self.on, ("batch", "kv_heads"), x) for x in lists]


def split_of(on: OnMesh | None, slots: Slots, mass: bool = False) -> MeshSplit | None:
    """Return the sharding of slots; None without a mesh, or if devices lack part of what they attend to.

    mass: whether the attention that slots receive is needed.
    """
    if on is None or on.devices("layers") > 1:
        return None
    apart = on.rules.mesh_axes("slots") if lie_apart(slots, on) else ()
    queries = axes_of_queries(on, slots.pos.shape[2], apart, mass=mass)
    return None if queries is None else MeshSplit(on, queries, apart)


def bare(slots: Slots) -> Slots:
    """Drop the slots' arrays that attention does not read."""
    return dataclasses.replace(slots, traces={}, summary={}, sums={}, near=None)


def said_of_one(split: MeshSplit | None, f: Callable[..., T], slots: Slots, q: Array) -> T:
    """Apply f to the slots that one device holds, and to their queries or new keys."""
    if split is None:
        return f(slots, q)
    return asked_of_one(split.on, f, split.specs(slots, q), (slots, q))


def attended_on_each(
    split: MeshSplit | None, f: Callable[..., Found], slots: Slots, q: Array, pos: Int[Array, "B T"],
    index: int | Array, beside: Any,
) -> Found:  # fmt: skip
    """f(slots, q, pos, index, beside), computed on every device; merged if a head's slots are split.

    beside: a tree of arrays [B, K, ...].
    """
    if split is None:
        return f(slots, q, pos, index, beside)

    def here(slots: Slots, q: Array, *others: Any) -> Found:
        out, lse, mass = f(slots, q, *others)
        return (*(merged_over(split.apart, out, lse) if split.apart else (out, lse)), mass)

    args = bare(slots), q, pos, jnp.asarray(index), beside
    rest = [specs_of(split.on, ("batch",), pos), *split.of_lists(args[3], beside)]
    out = split.on.spec(split.queries, q.shape[:2])
    return each_device(split.on, here, [*split.specs(*args[:2]), *rest], out)(*args)


def picked_on_each(
    split: MeshSplit | None, f: Callable[..., tuple[Array, Array]], q: Array, slots: Slots,
    index: int | Array, length: Int[Array, "B"],
) -> tuple[Array, Array]:  # fmt: skip
    """f(q, slots, index, length) [B, K, ...], computed by every device for its own KV heads."""
    if split is None:
        return f(q, slots, index, length)
    (of_slots, of_q), rows = split.specs(slots, q), split.on.spec(("batch",), length.shape)
    specs = of_q, of_slots, PartitionSpec(), rows
    out = split.on.spec(("batch", "kv_heads"), slots.pos.shape[1:3])
    return each_device(split.on, f, specs, (out, out))(q, slots, jnp.asarray(index), length)


def said_of_all(on: OnMesh | None, f: Callable[..., T], *args: Any) -> T:
    """Apply f to the arrays when they are replicated, as `on_all` would compute it."""
    if on is None or on.devices("pages") > 1:
        return f(*args)
    return asked_of_one(on, f, jax.tree.map(lambda _: PartitionSpec(), args), args)


def on_all(on: OnMesh | None, f: Callable[..., T], *args: Any) -> T:
    """f(*args) on replicated arrays, computed by every device."""
    if on is None or on.devices("pages") > 1:
        return f(*args)
    whole = jax.tree.map(lambda _: PartitionSpec(), args)
    return each_device(on, f, whole, PartitionSpec())(*args)


def on_this_device(split: MeshSplit | None, capacity: int, slot: Int[Array, "B K"]) -> Int[Array, "B K"]:
    """Slot indices within this device's `capacity` slots of a KV head; -1 for slots on other devices."""
    if split is None or not split.apart:
        return slot
    slot = slot - jax.lax.axis_index(split.apart) * capacity
    return jnp.where((slot >= 0) & (slot < capacity), slot, -1)
