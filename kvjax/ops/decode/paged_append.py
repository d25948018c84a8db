"""Appends one new token per (sequence, KV head) to a pool of pages, in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from kvjax.ops.base.dispatch import form
from kvjax.ops.base.row_scatter import scatter_rows
from kvjax.ops.base.triton import unable
from kvjax.ops.decode.append import LANES
from kvjax.ops.decode.page_pool import BITS, PER_CHANNEL, SUBLANES, PagePool
from kvjax.pallas_kernels.append import words_tpu as tpu
from kvjax.pallas_kernels.scalars import TABLE_BYTES


def paged_append(
    pool: PagePool,
    table: Int[Array, "B K M"],
    lengths: Int[Array, "B K"],
    k: Num[Array, "B K H"],
    v: Num[Array, "B K H"],
    layer: int | Int[Array, ""] = 0,
    *,
    numbers: Mapping[str, Float[Array, "B K"]] | None = None,
    active: Bool[Array, "B K"] | Bool[Array, " B"] | None = None,
    implementation: str | None = None,
) -> PagePool:
    """Add one more token to every active KV head of the pool, at slot `lengths`; the caller counts it.

    The pool is updated in place if it is donated, inside a scan over layers too. A KV head that is not
    active, or whose table is full, gets nothing, whatever its table says. No two active heads may write
    to the same page: copy a shared one first.

    numbers: the token's numbers by name ("pos", "key_scale", ...). In a pool of codes k and v are codes,
    those of 2 bits as uint8, since a TPU cannot hold small arrays of uint2. implementation: "reference", a
    scatter, "tpu", "gpu", or these two with " interpret"; None takes the kernel if it can run.

    Raises NotImplementedError if a forced form cannot run, and ValueError if the numbers are not the pool's,
    if a pool has scales per channel (its pages are encoded whole), or if k is not of the pool's type.

    >>> from kvjax.ops.decode.page_pool import make_pool
    >>> pages, table = jnp.zeros((1, 2, 4, 1)), jnp.asarray([[[1, 0]]])
    >>> one = jnp.ones((1, 1, 1))
    >>> pool = paged_append(make_pool(pages, pages), table, jnp.asarray([[5]]), one, 2 * one)
    >>> pool.keys[0, 0, :, 0].tolist(), pool.values[0, 0, :, 0].tolist()
    ([0.0, 1.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0])
    """
    given = numbers or {}
    if set(given) != set(pool.names) or set(given) & set(PER_CHANNEL):
        raise ValueError(
            f"numbers given for {sorted(given) or 'none'}, expected one for each of the pool's: "
            f"{', '.join(pool.names) or 'none'}, none of them of channels"
        )
    why = dict(tpu=refusal(pool, table), gpu=unable())
    chosen = form("paged_append", implementation, pool, k, v, **why)
    allowed = {pool.payload, "uint8"} if pool.payload == "uint2" else {pool.payload}
    if k.dtype.name not in allowed or v.dtype != k.dtype:
        raise ValueError(f"k of {k.dtype}, v of {v.dtype} for pages of {pool.payload}: encode or cast them")
    side = [given[n].astype(jnp.float32) for n in pool.names]
    if not chosen.startswith("tpu"):
        block, slot = places((pool.words.shape[1], pool.page), table, lengths, layer, active)
        how = _scatter if chosen == "reference" else partial(_by_gpu, interpret=chosen != "gpu")
        words = how(pool, _rows(pool, _bits(k), _bits(v)), side, block, slot)
    else:
        if active is not None:
            trailing = (1,) * (lengths.ndim - active.ndim)
            lengths = jnp.where(active.reshape(*active.shape, *trailing), lengths, -1)
        words = tpu_paged_append(pool, table, lengths, k, v, layer, side, interpret=chosen != "tpu")
    return dataclasses.replace(pool, words=words)


def refusal(pool: PagePool, table: Int[Array, "B K M"]) -> str:
    """Why the TPU kernel cannot write into `pool`; empty if it can."""
    held = table.shape[0] * table.shape[1] * -(-table.shape[2] // LANES) * LANES * 4
    if held > TABLE_BYTES:
        return f"a table of {held} bytes in whole rows of {LANES} numbers, expected at most {TABLE_BYTES}"
    if pool.words.shape[3] % LANES:
        return f"rows are {pool.words.shape[3]} wide, expected a multiple of {LANES}"
    if pool.rows % SUBLANES:
        return (
            f"{pool.page} tokens of {pool.payload} take {pool.rows} rows, expected a multiple of {SUBLANES}"
        )
    return ""


def _rows(pool: PagePool, k: Num[Array, "B K H"], v: Num[Array, "B K H"]) -> list[Num[Array, "I W"]]:
    """Lay out the new rows of a page: keys and values, side by side if they are packed."""
    wide = [x.reshape(-1, x.shape[-1]) for x in (k, v)]
    wide = [jnp.pad(x, ((0, 0), (0, pool.width - x.shape[1]))) for x in wide]
    return [jnp.concatenate(wide, 1)] if pool.packed else wide


def _bits(x: Num[Array, "*b"]) -> Int[Array, "*b"]:
    """Return the bits of x as the low bits of words."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.int32)
    same = {32: jnp.int32, 16: jnp.uint16, 8: jnp.uint8}[BITS[x.dtype.name]]
    return jax.lax.bitcast_convert_type(x, same).astype(jnp.int32)


def _scatter(
    pool: PagePool,
    new: Sequence[Int[Array, "I W"]],
    side: Sequence[Float[Array, "B K"]],
    block: Array,
    slot: Array,
) -> Array:
    """Read the words of the tokens, change them, and write them back with one flat scatter."""
    rows, width = pool.words.shape[2:]
    line, low = pool.word_of(jnp.maximum(slot, 0))
    mask = np.uint32(2 ** BITS[pool.payload] - 1).astype(np.int32) << low
    words = [x << low[:, None] for x in new]
    masks = [jnp.broadcast_to(mask[:, None], x.shape) for x in words]
    at = [line] if pool.packed else [line, pool.rows + line]
    lane = jnp.arange(width)[None] == slot[:, None] % width
    for name, x in zip(pool.names, side, strict=True):
        word = jax.lax.bitcast_convert_type(x, jnp.int32).reshape(-1, 1)
        words.append(jnp.broadcast_to(word, lane.shape))
        masks.append(jnp.where(lane, -1, 0))
        at.append(pool.number_row(name) + slot // width)
    index = block[:, None] * rows + jnp.stack(at, 1)
    flat = pool.words.reshape(-1, width)
    old = flat[jnp.clip(index, 0, flat.shape[0] - 1)]
    index = jnp.where(slot[:, None] >= 0, index, np.iinfo(np.int32).max).reshape(-1)
    kept = jnp.stack(masks, 1)
    done = (old & ~kept) | (jnp.stack(words, 1) & kept)
    return scatter_rows(flat, index, done.reshape(-1, width)).reshape(pool.words.shape)


def _by_gpu(
    pool: PagePool,
    new: Sequence[Int[Array, "I W"]],
    side: Sequence[Float[Array, "B K"]],
    block: Array,
    slot: Array,
    *,
    interpret: bool,
) -> Array:
    """Run the GPU kernel on the operands of `_scatter`."""
    from kvjax.pallas_kernels.append import words_gpu as gpu

    starts = (0,) if pool.packed else (0, pool.value_row)
    lanes = 1 << (pool.words.shape[3] - 1).bit_length()
    place = gpu.Place(starts, tuple(map(pool.number_row, pool.names)), BITS[pool.payload], lanes)
    numbers = [jax.lax.bitcast_convert_type(x, jnp.int32).reshape(-1) for x in side]
    at = block, slot, *pool.word_of(jnp.maximum(slot, 0))
    return gpu.append_words(pool.words, new, numbers, at, place=place, interpret=interpret)


def tpu_paged_append(
    pool: PagePool,
    table: Int[Array, "B K M"],
    lengths: Int[Array, "B K"],
    k: Num[Array, "B K H"],
    v: Num[Array, "B K H"],
    layer: int | Array,
    side: Sequence[Float[Array, "B K"]],
    *,
    interpret: Any = False,
) -> Array:
    """Run the kernel on the operands of `paged_append`; lengths below 0 write nothing."""
    starts = (0,) if pool.packed else (0, pool.value_row)
    height = -(-pool.page // pool.words.shape[3])
    page = tpu.Page(pool.page, starts, pool.value_row + pool.rows, pool.word_of, BITS[pool.payload], height)
    # The kernel extracts the bits of the other types itself.
    if pool.payload not in ("float32", "bfloat16", "int8"):
        k, v = _bits(k), _bits(v)
    return tpu.append_words(
        pool.words, _rows(pool, k, v), side,
        table.reshape(-1, 1, table.shape[2]).astype(jnp.int32), lengths.astype(jnp.int32),
        jnp.asarray(layer, jnp.int32).reshape(1), page=page, interpret=interpret,
    )  # fmt: skip


def places(
    sizes: tuple[int, int], table: Array, lengths: Array, layer: int | Array, active: Array | None
) -> tuple[Int[Array, " I"], Int[Array, " I"]]:
    """(page among those of all layers, slot in it) of every KV head's next token; slot -1 writes nothing.

    sizes: pages per layer and tokens per page; table [.., M]; lengths [..]; the shape of active is a prefix
    of that of lengths.
    """
    (count, page), most = sizes, table.shape[-1]
    at = jnp.clip(lengths // page, 0, most - 1).reshape(-1)
    # A flat index: on a TPU an index of several axes takes longer than the copies themselves.
    own = jnp.arange(at.shape[0], dtype=jnp.int32) * most
    found = table.reshape(-1)[own + at].reshape(lengths.shape)
    writes = (lengths >= 0) & (lengths < most * page)
    if active is not None:
        writes = writes & active.reshape(active.shape + (1,) * (lengths.ndim - active.ndim))
    block = jnp.asarray(layer, jnp.int32) * count + jnp.where(writes, found, 0)
    slot = jnp.where(writes, lengths % page, -1)
    return block.reshape(-1).astype(jnp.int32), slot.reshape(-1).astype(jnp.int32)
