"""The GPU kernel of paged decoding: a KV head's pages are split over many programs and merged later.

One program takes one split of one (sequence, KV head): blocks of rows of words, gathered by the head's table,
so that pages may be of any size. A row of words holds several tokens; each place within the words is a plane
of tokens, unpacked by shifts, so that no number has to move from one thread to another. A loop goes over the
planes: unrolling many of them takes long to compile and does not fit the registers.

The tables are those of PagedAttention (Kwon et al., 2023, arXiv:2309.06180); what split kernels share is in
`partial_gpu`. `kvjax.ops.decode.paged_decode` defines the result, and `kvjax.ops.decode.page_pool` the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kvjax.pallas_kernels import partial_gpu as parts
from kvjax.pallas_kernels.partial_gpu import NEG_INF, Cut

FLOAT8 = ("float8_e5m2", "float8_e4m3fn")
PER_WORD = {"float32": 1, "bfloat16": 2, "int8": 4, **dict.fromkeys(FLOAT8, 4), "int4": 8, "uint2": 16}
PER_CHANNEL = ("channel_scale", "channel_zero")


class Sizes(NamedTuple):
    """Static arguments: how the work is split, the layout of a page, and the logits' parameters.

    cut: steps are over rows of words. page: tokens of a page, rows: words of its keys. names: the numbers
    after its values, in order.
    """

    cut: Cut
    page: int
    rows: int
    payload: str
    names: tuple[str, ...]
    scale: float
    window: int | None = None
    softcap: float | None = None
    mass: bool = False


class Rows(NamedTuple):
    """Where a step's rows of words are, [block] each: page and row in it; `live`: whether a token counts.

    listed: the index of the page in the head's table.
    """

    layer: Any
    page: Any
    row: Any
    live: Any
    listed: Any


class Plane(NamedTuple):
    """One plane of the words: its tokens' indices in page and head, [block], and whether these count."""

    number: Any
    within: Any
    token: Any
    live: Any


def unpack(words: Any, plane: Any, payload: str, kind: Any) -> Any:
    """Unpack the codes of a plane of words [rows, W], as `kind`."""
    if payload == "float32":
        return jax.lax.bitcast_convert_type(words, jnp.float32).astype(kind)
    bits = 32 // PER_WORD[payload]
    if payload == "uint2":
        # The later half of a page's tokens is two bits above the earlier.
        shift = 4 * jax.lax.rem(plane, 8) + 2 * jax.lax.div(plane, 8)
    else:
        shift = bits * plane
    low = jax.lax.shift_right_logical(words, shift)
    if payload == "bfloat16":
        return jax.lax.bitcast_convert_type(low.astype(jnp.int16), jnp.bfloat16).astype(kind)
    if payload == "int8":
        return low.astype(jnp.int8).astype(kind)
    if payload in FLOAT8:
        return _float8(low << 24, payload).astype(kind)
    # Without conversions, of which a GPU does few at a time: the last bit of the fraction of 128 + n counts
    # units. If n has a sign, flipping that bit adds 8.
    code, over = (low & 3, 128) if payload == "uint2" else ((low & 15) ^ 8, 136)
    lifted = jax.lax.bitcast_convert_type((code | 0x4300).astype(jnp.int16), jnp.bfloat16)
    return (lifted - jnp.bfloat16(over)).astype(kind)


def _float8(lifted: Any, payload: str) -> Any:
    """8-bit floats, in the top of a word, as float32: e5m2 is the top of a float16, e4m3 nearly."""
    top = (lifted >> 16) & ~0xFF
    if payload == "float8_e4m3fn":
        # One more bit of exponent, with another offset: 2^8.
        top = (top & ~0x7FFF) | ((top & 0x7FFF) >> 1)
    found = jax.lax.bitcast_convert_type(top.astype(jnp.int16), jnp.float16).astype(jnp.float32)
    return found * 256.0 if payload == "float8_e4m3fn" else found


def _kernel(layer, lengths, table, q_pos, q, words, out, lse, *logits, sizes: Sizes) -> None:
    i, split, cut = pl.program_id(0), pl.program_id(1), sizes.cut
    length, first = lengths[i], split * (cut.blocks * cut.block)
    kind = jnp.float32 if q.dtype == jnp.float32 else jnp.bfloat16
    asked, queries = q_pos[i], q[i].astype(kind)
    count = PER_WORD[sizes.payload]

    def visit(step: Any, running: parts.Running) -> parts.Running:
        at = _rows(layer, table, i, first + step * cut.block, length, sizes)
        keys, values = (_load_rows(words, at, at.row + n, queries.shape[1]) for n in (0, sizes.rows))
        channels = _channels(words, at, queries.shape[1], sizes)

        def some(numbers: Sequence[Any], running: parts.Running) -> parts.Running:
            planes, scores = [_plane(n, at, length, sizes) for n in numbers], []
            for plane in planes:
                codes = unpack(keys, plane.number, sizes.payload, kind)
                for scale, zero in channels:
                    codes = (codes.astype(jnp.float32) * scale + zero).astype(kind)
                scores.append(_logits(words, at, plane, queries, codes, asked, sizes))
                if sizes.mass:
                    parts.keep_logits(logits[0], i, scores[-1], plane.token, plane.live, cut.queries)
            running, weights = parts.weigh(running, *scores)
            (acc,) = running.acc
            for plane, p in zip(planes, weights, strict=True):
                x = unpack(values, plane.number, sizes.payload, kind)
                acc = acc + _weighted(words, at, plane, p, x, sizes)
            return running._replace(acc=(acc,))

        if count <= 2:
            return some(range(count), running)
        return jax.lax.fori_loop(0, count, lambda n, running: some([n], running), running)

    running = parts.nothing_yet(queries.shape[0], [queries.shape[1]])
    turns = parts.trips(pl.cdiv(length, sizes.page) * sizes.rows, first, cut)
    parts.finish(jax.lax.fori_loop(0, turns, visit, running), out, lse, i, split, cut.queries)


def _rows(layer: Any, table: Any, i: Any, first: Any, length: Any, sizes: Sizes) -> Rows:
    """Load the rows of words from `first` on, in the order of the head's table."""
    number = first + jnp.arange(sizes.cut.block)
    listed, row = jax.lax.div(number, sizes.rows), jax.lax.rem(number, sizes.rows)
    # A row's first token is in plane 0.
    per = 8 if sizes.payload == "uint2" else PER_WORD[sizes.payload]
    live = listed * sizes.page + row * per < length
    return Rows(layer[0], plt.load(table.at[i, listed], mask=live, other=0), row, live, listed)


def _plane(number: Any, at: Rows, length: Any, sizes: Sizes) -> Plane:
    if sizes.payload == "uint2":
        within = at.row * 8 + jax.lax.rem(number, 8) + jax.lax.div(number, 8) * (sizes.page // 2)
    else:
        within = at.row * PER_WORD[sizes.payload] + number
    token = at.listed * sizes.page + within
    return Plane(number, within, token, token < length)


def _load_rows(words: Any, at: Rows, row: Any, lanes: int) -> Any:
    """Words [block, lanes] of the rows `row` of a step's pages, 0 where nothing counts."""
    width = words.shape[-1]
    lane = jnp.arange(lanes)
    rows, columns = parts.grid(row, lane)
    pages = parts.grid(at.page, lane)[0]
    wanted = at.live[:, None] & (lane < width)[None]
    return plt.load(words.at[at.layer, pages, rows, columns], mask=wanted, other=0)


def _channels(words: Any, at: Rows, lanes: int, sizes: Sizes) -> list[tuple[Any, Any]]:
    """Scale and zero of every channel of the step's keys, [block, lanes] each, if they have them."""
    if "channel_scale" not in sizes.names:
        return []
    rows = (jnp.full_like(at.row, _offset(name, words.shape[-1], sizes)) for name in PER_CHANNEL)
    scale, zero = (
        jax.lax.bitcast_convert_type(_load_rows(words, at, row, lanes), jnp.float32) for row in rows
    )
    return [(scale, zero)]


def _number(words: Any, at: Rows, plane: Plane, name: str, sizes: Sizes) -> Any:
    """Load the numbers `name` of the tokens of a plane, [block], 0 after the length."""
    width = words.shape[-1]
    row = _offset(name, width, sizes) + jax.lax.div(plane.within, width)
    ref = words.at[at.layer, at.page, row, jax.lax.rem(plane.within, width)]
    return jax.lax.bitcast_convert_type(plt.load(ref, mask=plane.live, other=0), jnp.float32)


def _offset(name: str, width: int, sizes: Sizes) -> int:
    """Return the first row of a page's numbers `name`."""
    before = sizes.names[: sizes.names.index(name)]
    return 2 * sizes.rows + sum(1 if n in PER_CHANNEL else -(-sizes.page // width) for n in before)


def _logits(words: Any, at: Rows, plane: Plane, q: Any, codes: Any, asked: Any, sizes: Sizes) -> Any:
    """Logits [queries, block] of a plane, -inf where a query does not see a token."""
    number = partial(_number, words, at, plane, sizes=sizes)
    z = parts.product(q, codes, 1)
    if "key_scale" in sizes.names:
        z = z * number("key_scale")[None]
    if "key_zero" in sizes.names:
        z = z + q.astype(jnp.float32).sum(1)[:, None] * number("key_zero")[None]
    z = z * sizes.scale
    if sizes.softcap is not None:
        z = sizes.softcap * jnp.tanh(z / sizes.softcap)
    if "bias" in sizes.names:
        z = z + number("bias")[None]
    seen = plane.live[None]
    if "pos" in sizes.names:
        pos, now = number("pos")[None], asked.astype(jnp.float32)[:, None]
        seen = seen & (pos >= 0.0) & (pos <= now)
        if sizes.window is not None:
            seen = seen & (pos > now - sizes.window)
    return jnp.where(seen, z, NEG_INF)


def _weighted(words: Any, at: Rows, plane: Plane, p: Any, x: Any, sizes: Sizes) -> Any:
    """Weigh the values x of a plane by p [queries, block]."""
    number = partial(_number, words, at, plane, sizes=sizes)
    rest = (p * number("value_zero")[None]).sum(1)[:, None] if "value_zero" in sizes.names else 0.0
    if "value_scale" in sizes.names:
        p = p * number("value_scale")[None]
    if sizes.payload in ("bfloat16", *FLOAT8):
        # A word's later tokens may be after the length and hold NaN, and zero times NaN is NaN.
        x = jnp.where(plane.live[:, None], x, jnp.zeros((), x.dtype))
    return parts.product(p.astype(x.dtype), x, 0) + rest


def paged_decode(
    q: jax.Array,
    words: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    q_pos: jax.Array,
    layer: jax.Array,
    *,
    sizes: Sizes,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Parts (out [I, C, Q, W'], lse [I, C, R]) of I KV heads in C splits, and logits [I, Q, S] for mass.

    q [I, R, W'] with R and W' powers of two from 16, W' at least W; words [L, P, rows, W] int32; table [I, M]
    with pages, or anything, for all C splits; lengths [I]; q_pos [I, R]; layer [1]. Q are the real queries;
    logits after a head's length are not written.
    """
    (lists, count, lanes), cut = q.shape, sizes.cut
    rows = cut.splits * cut.blocks * cut.block
    if table.shape[1] * sizes.rows < rows:
        raise ValueError(f"tables of {table.shape[1]} pages are shorter than {rows} rows of words: pad them")
    shapes = [(lists, cut.splits, cut.queries, lanes), (lists, cut.splits, count)]
    if sizes.mass:
        shapes.append((lists, cut.queries, table.shape[1] * sizes.page))
    made = parts.call(partial(_kernel, sizes=sizes), cut, shapes, "paged_decode", interpret)
    return tuple(made(layer, lengths, table, q_pos, q, words))
