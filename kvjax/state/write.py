"""Writes to slots in place: rows, blocks of rows, and empty slots appended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from kvjax.ops.base.dispatch import alone, platform
from kvjax.ops.base.memory import copy_blocks, in_host, listed, there, to_device, to_host
from kvjax.ops.base.row_scatter import scatter_rows
from kvjax.ops.decode.stacked_decode import on_lanes
from kvjax.state.cache import Slots
from kvjax.state.codes import Codes


def write_rows(
    x: Shaped[Array, "Lg B K S *r"], slot: Int[Array, "l B K C"], new: Array, layer: int | Array = 0
) -> Shaped[Array, "Lg B K S *r"]:
    """Write x[layer + i, b, k, slot[i, b, k, c]] = new[i, b, k, c]; slots outside [0, S) write nothing.

    One flat row scatter: it stays in place inside a scan that carries x, where a multi-dimensional index
    would copy the cache. If slots are on the lanes (`_by_lanes`), one slot per KV head is written by a
    `where` over the written layers instead: for a flat index XLA would copy x into another layout. If x is in
    host memory, its layers are written on the device.
    """
    layers, b, k, c = slot.shape
    s = x.shape[3]
    if in_host(x):
        return _write_far(write_rows, x, slot, new, layer)
    if c == 1 and _by_lanes(x):
        part = jax.lax.dynamic_slice_in_dim(x, layer, layers)
        slots = slot.reshape(*slot.shape, *(1,) * (x.ndim - 4))
        here = jax.lax.broadcasted_iota(jnp.int32, part.shape, 3) == slots
        part = jnp.where(here, new.astype(x.dtype), part)
        return jax.lax.dynamic_update_slice_in_dim(x, part, layer, 0)
    if not alone(x, slot, new):
        return _write_apart(x, slot, jnp.expand_dims(new, 4), layer)
    lists = layer * b * k + jnp.arange(layers * b * k, dtype=jnp.int32)
    flat_slot = slot.reshape(-1, c)
    row = jnp.where(
        (flat_slot >= 0) & (flat_slot < s), lists[:, None] * s + flat_slot, np.iinfo(np.int32).max
    )
    flat = x.reshape(-1, *x.shape[4:])
    rows = new.reshape(layers * b * k * c, *x.shape[4:]).astype(x.dtype)
    return scatter_rows(flat, row.reshape(-1), rows).reshape(x.shape)


def _write_far(write: Callable[..., Array], x: Array, at: Array, new: Array, layer: int | Array) -> Array:
    """write(x, at, new, layer) for an x in host memory, whose layers are copied to the device and back."""

    def one(i: int | Array, x: Array) -> Array:
        own = (jax.lax.dynamic_slice_in_dim(y, i, 1) for y in (at, new))
        part = write(to_device(jax.lax.dynamic_slice_in_dim(x, layer + i, 1)), *own)
        return jax.lax.dynamic_update_slice_in_dim(x, to_host(part), layer + i, 0)

    return jax.lax.fori_loop(0, at.shape[0], one, x)


def _by_lanes(x: Array) -> bool:
    """Whether slots are on the lanes of an accelerator: one number per slot, and on a TPU all narrow rows."""
    return x.ndim == 4 or (x.ndim == 5 and platform() == "tpu" and on_lanes(x))


def _write_apart(
    x: Shaped[Array, "Lg B K S *r"],
    start: Int[Array, "l B K C"],
    new: Shaped[Array, "l B K C n *r"],
    layer: int | Array,
) -> Shaped[Array, "Lg B K S *r"]:
    """Write x[layer + i, b, k, start[i, b, k, c] + j] = new[i, b, k, c, j], each KV head by itself.

    For arrays that are split over devices: rows and heads stay axes of the scatter, so every device writes
    its own. With a flat index, each would gather those of all others. Starts outside [0, S - n] write
    nothing.
    """
    inside = (start >= 0) & (start <= x.shape[3] - new.shape[4])
    number = layer + jnp.arange(start.shape[0], dtype=jnp.int32)[:, None, None, None]
    start = jnp.where(inside, start, np.iinfo(np.int32).max)
    axes = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(4, new.ndim)),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0, 3),
        operand_batching_dims=(1, 2),
        scatter_indices_batching_dims=(1, 2),
    )
    at = jnp.stack(jnp.broadcast_arrays(number, start), -1)
    return jax.lax.scatter(x, at, new.astype(x.dtype), axes, mode="drop")


def write_blocks(
    x: Shaped[Array, "Lg B K S *r"],
    block: Int[Array, "l B K C"],
    new: Shaped[Array, "l B K D *r"],
    layer: int | Array = 0,
) -> Shaped[Array, "Lg B K S *r"]:
    """Write blocks of n = D / C slots: x[layer + i, .., block[i, .., c] * n + j] = new[i, .., c * n + j].

    Blocks below 0 or after the end write nothing. As in `write_rows` the index is flat, and one number per
    slot is written by a `where`. The slots keep their axis: an accelerator would copy x to split it in two.
    """
    s, rest = x.shape[3], x.shape[4:]
    size = new.shape[3] // block.shape[3]
    if in_host(x) and not alone(x, block, new):
        return _write_far(write_blocks, x, block, new, layer)
    if in_host(x):
        source, count = listed((block >= 0) & (block < s // size))
        b, k, c = block.shape[1:]
        # Blocks are numbered through all KV heads of all layers.
        place = (layer * b * k + source // c) * (s // size) + block.reshape(-1)[source]
        return copy_blocks(x, new.astype(x.dtype), (source, place), count, size)
    if x.ndim == 4 and block.shape[3] == 1:
        part = jax.lax.dynamic_slice_in_dim(x, layer, block.shape[0])
        place = jax.lax.broadcasted_iota(jnp.int32, part.shape, 3) - block * size
        mine = jnp.take_along_axis(new.astype(x.dtype), jnp.clip(place, 0, size - 1), axis=3)
        part = jnp.where((place >= 0) & (place < size), mine, part)
        return jax.lax.dynamic_update_slice_in_dim(x, part, layer, 0)
    if not alone(x, block, new):
        there = (block >= 0) & (block < s // size)
        start = jnp.where(there, block * size, -1)
        return _write_apart(x, start, new.reshape(*block.shape, size, *rest), layer)
    flat_block = block.reshape(-1, block.shape[3])
    first = layer * x.shape[1] * x.shape[2]
    lists = first + jnp.arange(flat_block.shape[0], dtype=jnp.int32)[:, None]
    there = (flat_block >= 0) & (flat_block < s // size)
    start = jnp.where(there, lists * s + flat_block * size, np.iinfo(np.int32).max).reshape(-1, 1)
    done = jax.lax.scatter(
        x.reshape(-1, *rest),
        start,
        new.reshape(-1, size, *rest).astype(x.dtype),
        jax.lax.ScatterDimensionNumbers(tuple(range(1, 2 + len(rest))), (), (0,)),
        mode="drop",
    )
    return done.reshape(x.shape)


def put_in_rows(
    x: Shaped[Array, "*b W"], at: Int[Array, "*b k"], values: Shaped[Array, "*b k"] | Array
) -> Shaped[Array, "*b W"]:
    """Write x[..., at[..., i]] = values[..., i], a different index per row; values may be a scalar.

    If arrays are split over devices, every device has its own rows: a scatter would gather them.
    """
    if alone(x, at, values):
        return jnp.put_along_axis(x, at, values, -1, inplace=False)
    place = jax.lax.broadcasted_iota(jnp.int32, (*at.shape, x.shape[-1]), at.ndim)
    here = at[..., None] == place
    put = jnp.where(here, jnp.broadcast_to(values, at.shape)[..., None], jnp.zeros((), x.dtype))
    return jnp.where(here.any(-2), put.sum(-2, dtype=x.dtype), x)


def after(count: Int[Array, "*b"], x: Float[Array, "*_"]) -> Int[Array, "*b"]:
    """`count`, below 2^31 - 1; on CPUs, a write that uses it waits until all inputs of x have been read.

    XLA for CPUs orders operations by data alone, and would copy a cache that could be written before it is
    read.
    """
    if platform() != "cpu":
        return count
    return jnp.minimum(count, np.iinfo(np.int32).max - jnp.isnan(x).any().astype(jnp.int32))


def first_empty(pos: Int[Array, "*b S"]) -> Int[Array, "*b"]:
    """Index of the first empty slot; S (which writes nothing) if all are taken."""
    s = pos.shape[-1]
    slot = jax.lax.broadcasted_iota(jnp.int32, pos.shape, pos.ndim - 1)
    return jnp.where(pos < 0, slot, s).min(-1)


def write_slots(
    slots: Slots,
    slot: Int[Array, "l B K C"],
    k: Float[Array, "l B K C H"] | None,
    v: Float[Array, "l B K C V"] | None,
    pos: Int[Array, "l B K C"],
    *,
    bias: Float[Array, "l B K C"] | None = None,
    traces: dict[str, Array] | None = None,
    layer: int | Array = 0,
) -> Slots:
    """Write tokens to given slots of layers layer .. layer + l - 1, encoded as the segment is encoded.

    Slots outside [0, S) write nothing, and keys or values are unchanged if k or v is None. Codecs must encode
    token by token here.
    """

    def put(old: Array | Codes, new: Array) -> Array | Codes:
        if not isinstance(old, Codes):
            return write_rows(old, slot, new, layer)
        rows = old.encoded(new, layer, slot.shape[0])
        data = {n: write_rows(x, slot, rows[n], layer) for n, x in old.data.items()}
        return dataclasses.replace(old, data=data)

    zero = jnp.zeros(slot.shape, jnp.float32)
    traces = traces or {}
    return dataclasses.replace(
        slots,
        k=slots.k if k is None else put(slots.k, k),
        v=slots.v if slots.v is None or v is None else put(slots.v, v),
        pos=write_rows(slots.pos, slot, pos, layer),
        bias=None
        if slots.bias is None
        else write_rows(slots.bias, slot, zero if bias is None else bias, layer),
        traces={n: write_rows(x, slot, traces.get(n, zero), layer) for n, x in slots.traces.items()},
    )


def pad_slots(slots: Slots, room: int) -> Slots:
    """Append `room` empty slots to the slots."""
    if room <= 0:
        return slots

    def grow(x: Array, fill: int = 0) -> Array:
        return jnp.pad(x, [(0, 0)] * 3 + [(0, room)] + [(0, 0)] * (x.ndim - 4), constant_values=fill)

    return dataclasses.replace(
        slots,
        k=jax.tree.map(partial(there, grow), slots.k),
        v=jax.tree.map(partial(there, grow), slots.v),
        pos=grow(slots.pos, -1),
        bias=None if slots.bias is None else grow(slots.bias),
        traces={n: grow(x) for n, x in slots.traces.items()},
    )
