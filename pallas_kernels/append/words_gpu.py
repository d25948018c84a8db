"""The GPU kernel that writes one token per KV head into pages of words; see `ops.decode.paged_append`.

A program writes the token of one KV head: it reads the words that hold it, changes its bits and stores them.
XLA's scatter does the same, but copies the pool of a server once for each loop of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


class Place(NamedTuple):
    """Where the words of a token lie in a page: static.

    starts: the first rows of the codes; side: those of the numbers. bits: of a code. lanes: words of a row,
    rounded up to a power of two.
    """

    starts: tuple[int, ...]
    side: tuple[int, ...]
    bits: int
    lanes: int


def _kernel(block: Any, slot: Any, row: Any, low: Any, *refs: Any, place: Place) -> None:
    codes, numbers, words = refs[: len(place.starts)], refs[len(place.starts) : -2], refs[-1]
    i, width = pl.program_id(0), words.shape[2]
    page, live, lane = block[i], slot[i] >= 0, jnp.arange(place.lanes)
    wanted = (lane < width) & live
    for start, new in zip(place.starts, codes, strict=True):
        at = words.at[page, start + row[i], lane]
        word = plt.load(new.at[i, lane], mask=wanted, other=0)
        if place.bits < 32:
            mask = jnp.left_shift(jnp.int32(2**place.bits - 1), low[i])
            old = plt.load(at, mask=wanted, other=0)
            word = (old & ~mask) | (jnp.left_shift(word, low[i]) & mask)
        plt.store(at, word, mask=wanted)
    for start, new in zip(place.side, numbers, strict=True):
        at = words.at[page, start + jax.lax.div(slot[i], width), jax.lax.rem(slot[i], width)]
        plt.store(at, new[i], mask=live)


def append_words(
    pool: jax.Array,
    codes: Sequence[jax.Array],
    numbers: Sequence[jax.Array],
    at: Sequence[jax.Array],
    *,
    place: Place,
    interpret: bool = False,
) -> jax.Array:
    """Return the pool [L, P, R, W] of int32 words, updated in place with a token for each of I KV heads.

    codes: for every start the low bits of words [I, W]. numbers: words [I] each. at: [I] each: page among
    those of all layers, slot in it (below 0 to write nothing), row after a start, and lowest bit.
    """
    layers, pages, rows, width = pool.shape
    shape = jax.ShapeDtypeStruct((layers * pages, rows, width), pool.dtype)
    done = pl.pallas_call(
        partial(_kernel, place=place),
        grid=(codes[0].shape[0],),
        out_shape=shape,
        input_output_aliases={len(at) + len(codes) + len(numbers): 0},
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="paged_append",
    )(*at, *codes, *numbers, pool.reshape(shape.shape))
    return done.reshape(pool.shape)
