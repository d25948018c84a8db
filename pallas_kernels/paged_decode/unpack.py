"""Unpacks pages of 32-bit words inside a kernel: codes for the matrix unit, and rows of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas_kernels.streaming import SUBLANES

PER_CHANNEL = ("channel_scale", "channel_zero")


def unpack(words: Any, payload: str, kind: Any) -> Any:
    """Codes [pages, tokens, W] of type `kind`, unpacked from words [pages, rows, W].

    Words are reinterpreted as codes only in registers: a load of narrow types would be re-laid out, at twice
    the cost.
    """
    pages, rows, width = words.shape
    if payload == "uint2":
        # Two planes of 4-bit numbers, which the hardware can widen.
        planes = [jax.lax.shift_right_logical(words, 2 * i) & 0x33333333 for i in (0, 1)]
        return jnp.concatenate([unpack(x, "int4", kind) for x in planes], axis=1)
    flat = words.reshape(pages * rows, width)
    if payload == "float32":
        found = jax.lax.bitcast_convert_type(flat, jnp.float32)
    else:
        found = pltpu.bitcast(flat, jnp.dtype(payload))
    return found.astype(kind).reshape(pages, -1, width)


def codes_of(buffer: Any, slot: Any, sizes: Any, first: int, kind: Any) -> Any:
    """Codes [pages, page, W] of a step's keys or values, whose rows begin at `first`.

    Rows that do not fill whole tiles are unpacked with the rest of the tile, and sliced as tokens.
    """
    if sizes.rows % SUBLANES == 0:
        return unpack(buffer[slot, :, first : first + sizes.rows], sizes.payload, kind)
    tiles = -(-(first + sizes.rows) // SUBLANES) * SUBLANES
    found = unpack(buffer[slot, :, :tiles], sizes.payload, kind)
    planes = 2 if sizes.payload == "uint2" else 1
    size, every = sizes.page // planes, found.shape[1] // planes
    starts = [i * every + first * size // sizes.rows for i in range(planes)]
    return jnp.concatenate([found[:, at : at + size] for at in starts], axis=1)


def rows_of(sizes: Any, width: int) -> Iterator[tuple[str, int, int]]:
    """Return (name, first row, rows) of the numbers of a page, in their order."""
    at = sizes.values + sizes.rows
    for name in sizes.names:
        height = sizes.groups if name in PER_CHANNEL else pl.cdiv(sizes.page, width)
        yield name, at, height
        at += height


def page_numbers(buffer: Any, slot: Any, sizes: Any) -> dict[str, Any]:
    """Read a step's pages' numbers by name: [1, tokens], or lists [page][group] of [1, W] for channels."""
    width, found = buffer.shape[3], {}

    def row(n: int, index: int) -> Any:
        return jax.lax.bitcast_convert_type(buffer[slot, n, index : index + 1], jnp.float32)

    for name, at, height in rows_of(sizes, width):
        if name in PER_CHANNEL:
            found[name] = [[row(n, at + g) for g in range(height)] for n in range(sizes.step)]
        else:
            pieces = [
                row(n, at + i)[:, : sizes.page - i * width] for n in range(sizes.step) for i in range(height)
            ]
            found[name] = jnp.concatenate(pieces, axis=1)
    return found


def blank(buffer: Any, slot: Any, sizes: Any, live: Any) -> None:
    """Zeros values and their numbers, of tokens from `live` on, because they may hold NaN."""
    width, per = buffer.shape[3], sizes.page // sizes.rows
    floats = sizes.payload.startswith(("float", "bfloat"))

    def one(n: Any, carry: Any) -> Any:
        left = live - n * sizes.page
        if floats:
            rows = buffer.at[slot, n, pl.ds(sizes.values, sizes.rows)]
            real = jnp.clip(left - per * jax.lax.broadcasted_iota(jnp.int32, (sizes.rows, 1), 0), 0, per)
            # The first tokens of a row are the low bits of its words.
            low = jnp.left_shift(1, (32 // per) * jnp.minimum(real, per - 1)) - 1
            rows[...] = rows[...] & jnp.where(real == per, -1, low)
        for name, at, height in rows_of(sizes, width):
            if name in ("value_scale", "value_zero"):
                rows = buffer.at[slot, n, pl.ds(at, height)]
                token = [jax.lax.broadcasted_iota(jnp.int32, (height, width), i) for i in (0, 1)]
                rows[...] = jnp.where(token[0] * width + token[1] < left, rows[...], 0)
        return carry

    jax.lax.fori_loop(jnp.minimum(live // sizes.page, sizes.step), sizes.step, one, 0)
