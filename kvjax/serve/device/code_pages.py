"""Codes in pages: the arrays that any codec returns for its granules, side by side in the words of a page.

A page is a row of 32-bit words. Each array of a codec has a piece of it, in which granules (as many tokens as
the codec encodes together) follow each other, so that a granule is written by itself.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar import Store
from kvjax.state.codes import Codec

POS, ROWS = "pos", ""
# The types whose bits a word can hold.
PLAIN = ("uint8", "int8", "uint16", "int16", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
WHOLE = ("uint32", "int32", "float32")


class PageArray(NamedTuple):
    """The place of one array in a page: `words` words for a granule, from word `first` of the page on.

    side: "key", "value" or "pos". shape, dtype: of the array for one granule.
    """

    side: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    words: int
    first: int = 0


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """How a page holds tokens: by codecs (None: uncoded), `granule` at a time, `tokens` in all.

    words: how many of the page's words are used. dtype: of keys and values when they are decoded.
    """

    keys: Codec | None
    values: Codec | None
    granule: int
    tokens: int
    pieces: tuple[PageArray, ...]
    width: int
    dtype: str

    @property
    def granules(self) -> int:
        """Granules of a page."""
        return self.tokens // self.granule

    @property
    def words(self) -> int:
        return self.granules * sum(piece.words for piece in self.pieces)


def layout_of(
    store: Store | None, sizes: tuple[int, int], dtype: str, words: int, positions: bool,
    most: int | None = None,
) -> PageLayout | str:  # fmt: skip
    """Return the layout of a page of `words` words; or a text that says why there is none.

    sizes: KV heads, and channels of each. positions: whether every token's position is stored, too. most: the
    most tokens that a page may hold.
    """
    keys, values = (None, None) if store is None else (store.keys, store.values)
    granule = 1 if store is None else store.granule
    pieces: list[PageArray] = [PageArray(POS, ROWS, (granule,), "int32", granule)] if positions else []
    for side, codec in (("key", keys), ("value", values)):
        found = _pieces(side, codec, granule, sizes, dtype)
        if found is None:
            return "its codes cannot be cut into granules of one KV head"
        pieces += found
    count = words // sum(piece.words for piece in pieces)
    count = count if most is None else min(count, most // granule)
    if not count:
        need = sum(piece.words for piece in pieces)
        return f"{granule} tokens are encoded together in {4 * need} bytes, and a page has {4 * words}"
    first, placed = 0, []
    for piece in pieces:
        placed.append(piece._replace(first=first))
        first += count * piece.words
    return PageLayout(keys, values, granule, count * granule, tuple(placed), sizes[1], dtype)


def _pieces(
    side: str, codec: Codec | None, granule: int, sizes: tuple[int, int], dtype: str
) -> list[PageArray] | None:
    """Return the arrays of a codec for one granule of one KV head; None if they do not belong to one."""
    heads, width = sizes

    def shapes(count: int) -> dict[str, jax.ShapeDtypeStruct]:
        rows = jax.ShapeDtypeStruct((1, heads, count * granule, width), jnp.dtype(dtype))
        return {ROWS: rows} if codec is None else jax.eval_shape(codec.encode, rows)

    try:
        one, two = shapes(1), shapes(2)
    except ValueError:
        return None
    found = []
    for name, x in one.items():
        want = (*x.shape[:2], 2 * x.shape[2], *x.shape[3:]) if x.ndim > 2 else ()
        known = x.dtype.name in PLAIN + WHOLE
        if not known or two[name].shape != want or x.shape[:2] != (1, heads):
            return None
        size = math.prod(x.shape[2:]) * x.dtype.itemsize
        found.append(PageArray(side, name, x.shape[2:], x.dtype.name, -(-size // 4)))
    return found


def as_words(x: Array, piece: PageArray) -> Int[Array, "*b G n"]:
    """Write the words of an array [*b, G * rows, ...] of G granules."""
    batch = x.shape[: x.ndim - len(piece.shape)]
    x = x.reshape(*batch, x.shape[len(batch)] // piece.shape[0], -1)
    per = 4 // x.dtype.itemsize
    x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, -x.shape[-1] % per),))
    x = x if per == 1 else x.reshape(*x.shape[:-1], piece.words, per)
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def of_words(words: Int[Array, "*b G n"], piece: PageArray) -> Array:
    """Invert `as_words`."""
    dtype = jnp.dtype(piece.dtype)
    batch, x = words.shape[:-2], jax.lax.bitcast_convert_type(words, dtype)
    x = x.reshape(*batch, words.shape[-2], -1)[..., : math.prod(piece.shape)]
    return x.reshape(*batch, words.shape[-2] * piece.shape[0], *piece.shape[1:])


def encoded(
    layout: PageLayout, k: Float[Array, "*b S H"], v: Float[Array, "*b S H"], pos: Int[Array, "*b S"]
) -> tuple[Array, ...]:
    """Whole granules of tokens as words [*b, S / granule, n], one array for each piece."""
    data = {"key": _data(layout.keys, k, layout), "value": _data(layout.values, v, layout)}
    data[POS] = {ROWS: pos.astype(jnp.int32)}
    return tuple(as_words(data[piece.side][piece.name], piece) for piece in layout.pieces)


def _data(codec: Codec | None, x: Array, layout: PageLayout) -> dict[str, Array]:
    x = x.astype(jnp.dtype(layout.dtype))
    return {ROWS: x} if codec is None else codec.encode(x)


def listed(
    words: Int[Array, "L P R W"], layout: PageLayout, pages: Int[Array, "B K M"], layer: int | Array
) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"], Int[Array, "B K S"] | None]:
    """List the keys, values and positions (None where none are stored) of all tokens of some pages."""
    flat = words.reshape(-1, words.shape[2] * words.shape[3])
    rows = (jnp.asarray(layer, jnp.int32) * words.shape[1] + pages)[..., None]
    how = jax.lax.GatherDimensionNumbers((3,), (0,), (0, 1))
    data: dict[str, dict[str, Array]] = {"key": {}, "value": {}, POS: {}}
    for piece in layout.pieces:
        # Each piece is gathered by itself: a slice of whole pages would be a second copy.
        at = jnp.concatenate([rows, jnp.full_like(rows, piece.first)], -1)
        size = 1, layout.granules * piece.words
        part = jax.lax.gather(flat, at, how, size, mode=jax.lax.GatherScatterMode.CLIP)
        part = part.reshape(*pages.shape[:2], -1, piece.words)
        data[piece.side][piece.name] = of_words(part, piece)
    k, v = (
        data[side][ROWS] if codec is None else codec.decode(data[side], layout.width, jnp.dtype(layout.dtype))
        for side, codec in (("key", layout.keys), ("value", layout.values))
    )
    return k, v, data[POS].get(ROWS)


def put(
    words: Int[Array, "L P R W"], layout: PageLayout, table: Int[Array, "*b M"], at: Int[Array, "*b F"],
    new: tuple[Array, ...], writes: Bool[Array, "*b F"], layer: int | Array = 0,
) -> Int[Array, "L P R W"]:  # fmt: skip
    """Write granules (`encoded`, [*b, F, n]) to the places `at` of lists of pages, where `writes` is true.

    Place i is granule i % granules of page i // granules of the list; beyond its pages nothing is written.
    layer: one for all lists, or [*b, 1].
    """
    writes = writes & (at < layout.granules * table.shape[-1])
    page = jnp.take_along_axis(table, jnp.clip(at // layout.granules, 0, table.shape[-1] - 1), -1)
    row = jnp.asarray(layer, jnp.int32) * words.shape[1] + page
    row = jnp.where(writes, row, np.iinfo(np.int32).max).reshape(-1)
    within = (at % layout.granules).reshape(-1)
    flat = words.reshape(-1, words.shape[2] * words.shape[3])
    if row.shape[0] == 1:
        # XLA for CPUs copies the operand of a scatter of one row; see `scatter_rows`.
        row = jnp.concatenate([row, jnp.full_like(row, np.iinfo(np.int32).max)])
        within = jnp.concatenate([within, within])
    how = jax.lax.ScatterDimensionNumbers((1,), (0,), (0, 1))
    for piece, x in zip(layout.pieces, new, strict=True):
        x = x.reshape(-1, piece.words)
        x = jnp.repeat(x, 2, 0) if x.shape[0] < row.shape[0] else x
        index = jnp.stack([row, piece.first + within * piece.words], 1)
        flat = jax.lax.scatter(flat, index, x, how, mode=jax.lax.GatherScatterMode.FILL_OR_DROP)
    return flat.reshape(words.shape)
