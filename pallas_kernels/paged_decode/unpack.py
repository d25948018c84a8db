"""What pages of 32-bit words hold, inside a kernel: codes for the matrix unit, and rows of numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

PER_CHANNEL = ("channel_scale", "channel_zero")


def unpack(words: Any, payload: str, kind: Any) -> Any:
    """Codes [pages, tokens, W] of type `kind` that words [pages, rows, W] hold.

    Words are read as codes only in registers: a load of narrow types is laid out anew, at twice the cost.
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


def page_numbers(buffer: Any, slot: Any, sizes: Any) -> dict[str, Any]:
    """The numbers of a step's pages by name: [1, tokens], or a list of [1, W] where they go with channels."""
    width, at, found = buffer.shape[3], 2 * sizes.rows, {}

    def row(n: int, index: int) -> Any:
        return jax.lax.bitcast_convert_type(buffer[slot, n, index : index + 1], jnp.float32)

    for name in sizes.names:
        if name in PER_CHANNEL:
            found[name] = [row(n, at) for n in range(sizes.step)]
            at += 1
            continue
        height = pl.cdiv(sizes.page, width)
        pieces = [row(n, at + i) for n in range(sizes.step) for i in range(height)]
        found[name] = jnp.concatenate([x[:, : sizes.page] for x in pieces], axis=1)
        at += height
    return found
