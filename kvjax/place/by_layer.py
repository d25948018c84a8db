"""Slots in host memory without a read method: a step copies them to the device layer by layer."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.mesh.on_mesh import Axes, OnMesh
from kvjax.mesh.per_device import each_device, specs_of
from kvjax.ops.base.dispatch import platform
from kvjax.ops.base.memory import copy_blocks, in_host, listed, to_device, to_host
from kvjax.ops.decode.stacked_decode import on_lanes
from kvjax.state.cache import Near, Paged, Pages, Slots
from kvjax.state.page_gather import layer_on_device

# The most slots of a KV head that are copied back to host memory for a new token: a TPU copies whole tiles.
BLOCK = 32
_LISTS: Axes = ("layers", "batch", "kv_heads")


def far(slots: Slots) -> Slots:
    """Move the slots' keys and values to host memory, to be copied layer by layer.

    Arrays with one number per slot, such as scales, stay on the device. Raises NotImplementedError for rows
    that a TPU would re-lay out in host memory, together with all others.
    """
    k, v = _far(slots)
    return dataclasses.replace(slots, k=k, v=v, far=True)


def far_pages(pool: Pages, most: int) -> Pages:
    """Move the pool's keys and values to host memory; `most`: the most pages of a layer.

    As many are copied for every layer, since a program's copies have static sizes. Raises as `far`.
    """
    k, v = _far(pool)
    return dataclasses.replace(pool, k=k, v=v, far=min(most, pool.owner.shape[0]))


def _far(part: Slots | Pages) -> Any:
    """Keys and values in host memory, but for arrays with one number per slot."""
    rows = [x for x in jax.tree.leaves((part.k, part.v)) if x.ndim > part.pos.ndim]
    strange = [x for x in rows if x.dtype.itemsize == 1 or on_lanes(x)]
    if platform() == "tpu" and strange:
        raise NotImplementedError(
            f"rows of {strange[0].shape[-1]} {strange[0].dtype} were given to host memory, which a TPU can "
            "bring from there in multiples of 128 numbers of two or four bytes: use another store, such as "
            "kivi or none, or leave Host() out"
        )
    return jax.tree.map(lambda x: to_host(x) if x.ndim > part.pos.ndim else x, (part.k, part.v))


def brought(slots: Slots, layer: int | Array) -> Slots:
    """Start to copy one layer's keys and values of the slots to the device."""

    def one(x: Array) -> Array:
        return to_device(jax.lax.dynamic_slice_in_dim(x, layer, 1))

    k, v = (jax.tree.map(one, x) for x in (slots.k, slots.v))
    if platform() == "gpu":
        # The barrier orders a layer's writes after its copy, or XLA for GPUs would copy the written array.
        held, (k, v) = jax.lax.optimization_barrier(((slots.k, slots.v), (k, v)))
        slots = dataclasses.replace(slots, k=held[0], v=held[1])
    return dataclasses.replace(slots, near=Near(Slots(k, v, _one(slots.pos, layer), shared=slots.shared)))


def brought_pages(pages: Paged, pool: Pages, layer: int | Array) -> Paged:
    """Start to copy the pages of one layer of a group to the device."""
    near = layer_on_device(pages.layer(layer), pool, pages.first_layer + layer)
    return dataclasses.replace(pages, near=near)


def of_layer(slots: Slots, layer: int | Array) -> Slots:
    """One layer's slots, [1, B, K, S, ...], with the device's copy of its keys and values."""
    near = slots.near
    rest = dataclasses.replace(slots, k=slots.pos, v=None, near=None, far=False)
    rest = jax.tree.map(lambda x: _one(x, layer), rest)
    if near is not None:
        return dataclasses.replace(rest, k=near.slots.k, v=near.slots.v)
    k, v = (jax.tree.map(lambda x: _one(x, layer), x) for x in (slots.k, slots.v))
    return dataclasses.replace(rest, k=k, v=v)


def gone(part: Slots | Paged) -> Slots | Paged:
    """Drop the device's copy of a layer from the slots, or pages."""
    copied = isinstance(part, Paged) or part.far
    return dataclasses.replace(part, near=None) if copied else part


def stored(
    slots: Slots, one: Slots, slot: Int[Array, "B K"], layer: int | Array, on: OnMesh | None = None
) -> Slots:
    """Copy `slot` of every KV head of `one`, [1, B, K, S, ...], back to a layer in host memory.

    The block of slots around it is copied, and nothing else; on a mesh, every device copies its own.
    Slots outside [0, S) copy nothing.
    """
    args = (slots.k, slots.v), (one.k, one.v), slot, jnp.asarray(layer)
    if on is None:
        k, v = _stored(*args)
    else:
        specs = [
            specs_of(on, axes, x) for axes, x in zip((_LISTS, _LISTS, _LISTS[1:], ()), args, strict=True)
        ]
        k, v = each_device(on, _stored, specs, specs[0])(*args)
    near = None if slots.near is None else Near(dataclasses.replace(slots.near.slots, k=one.k, v=one.v))
    return dataclasses.replace(slots, k=k, v=v, near=near)


def _stored(tree: Any, new: Any, slot: Int[Array, "B K"], layer: Array) -> Any:
    def put(to: Array, new: Array) -> Array:
        if not in_host(to):
            return jax.lax.dynamic_update_slice_in_dim(to, new.astype(to.dtype), layer, 0)
        size = math.gcd(BLOCK, to.shape[3])
        blocks, lists = to.shape[3] // size, slot.shape[0] * slot.shape[1]
        which, count = listed((slot >= 0) & (slot < to.shape[3]))
        source = which * blocks + slot.reshape(-1)[which] // size
        return copy_blocks(to, new, (source, layer * lists * blocks + source), count, size)

    return jax.tree.map(put, tree, new)


def _one(x: Array, layer: int | Array) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, layer, 1)
