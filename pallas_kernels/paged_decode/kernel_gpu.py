"""The GPU kernel of paged decoding: a list's pages are split over many programs and the parts merged later.

One program takes one split of one (sequence, KV head): blocks of rows of words, gathered by the list's table,
so that pages may be of any size. A row of words holds several tokens; each place within the words is a plane
of tokens, unpacked by shifts, and no number moves from one thread to another for it. The tables are those of
PagedAttention (Kwon et al., 2023, arXiv:2309.06180), what kernels in parts share lies in `partial_gpu`. What
it computes is defined by `kvjax.ops.paged_decode`, what a page holds by `kvjax.ops.page_pool`.
"""

from __future__ import annotations

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
    """What is static: how the work is cut, what a page holds, and what is done to the logits.

    cut: steps are of rows of words. page: tokens of a page, rows: words of its keys. names: the numbers
    behind its values, in order.
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
    """Where a step's rows of words lie, [block] each: page and row in it; `live`: whether a token counts.

    token: of the list, of each plane; within: the same of the page.
    """

    layer: Any
    page: Any
    row: Any
    live: Any
    token: list[Any]
    within: list[Any]


def unpack(words: Any, payload: str, kind: Any) -> list[Any]:
    """The codes of every plane of words [rows, W], as `kind`."""
    if payload == "float32":
        return [jax.lax.bitcast_convert_type(words, jnp.float32).astype(kind)]
    if payload == "bfloat16":
        halves = [words.astype(jnp.int16), jax.lax.shift_right_logical(words, 16).astype(jnp.int16)]
        return [jax.lax.bitcast_convert_type(x, jnp.bfloat16).astype(kind) for x in halves]
    if payload == "uint2":
        # The later half of a page's tokens lies two bits above the earlier.
        shifts = [4 * i + 2 * half for half in (0, 1) for i in range(8)]
        return [(jax.lax.shift_right_logical(words, n) & 3).astype(jnp.float32).astype(kind) for n in shifts]
    if payload == "int4" and kind == jnp.bfloat16:
        return _int4(words)
    bits = 32 // PER_WORD[payload]
    lifted = [words << (32 - bits * (i + 1)) for i in range(PER_WORD[payload])]
    if payload in FLOAT8:
        return [_float8(x, payload).astype(kind) for x in lifted]
    return [(x >> (32 - bits)).astype(jnp.float32).astype(kind) for x in lifted]


def _int4(words: Any) -> list[Any]:
    """Planes of 4 bits as bfloat16, two at once and without conversions, of which a GPU does few at a time.

    With its sign turned over, n + 8 is the end of the fraction of 128 + 8 + n, whose last bit counts ones.
    """
    pairs = [((words >> (4 * i)) & 0x000F000F) ^ 0x43084308 for i in range(4)]
    halves = [*pairs, *(jax.lax.shift_right_logical(x, 16) for x in pairs)]
    return [
        jax.lax.bitcast_convert_type(x.astype(jnp.int16), jnp.bfloat16) - jnp.bfloat16(136) for x in halves
    ]


def _float8(lifted: Any, payload: str) -> Any:
    """Numbers of 8 bits, in the top of a word, as float32: e5m2 is the top of a float16, e4m3 nearly."""
    top = (lifted >> 16) & ~0xFF
    if payload == "float8_e4m3fn":
        # One bit more of exponent, which has another zero: 2^8.
        top = (top & ~0x7FFF) | ((top & 0x7FFF) >> 1)
    found = jax.lax.bitcast_convert_type(top.astype(jnp.int16), jnp.float16).astype(jnp.float32)
    return found * 256.0 if payload == "float8_e4m3fn" else found


def _kernel(layer, lengths, table, q_pos, q, words, out, lse, *logits, sizes: Sizes) -> None:
    i, split, cut = pl.program_id(0), pl.program_id(1), sizes.cut
    length, first = lengths[i], split * (cut.blocks * cut.block)
    kind = jnp.float32 if q.dtype == jnp.float32 else jnp.bfloat16
    asked, queries = q_pos[i], q[i].astype(kind)

    def visit(step: Any, running: parts.Running) -> parts.Running:
        at = _rows(layer, table, i, first + step * cut.block, length, sizes)
        scores = _scores(words, at, queries, asked, length, sizes, kind)
        if sizes.mass:
            for z, token in zip(scores, at.token, strict=True):
                parts.keep_logits(logits[0], i, z, token, token < length, cut.queries)
        running, weights = parts.weigh(running, scores)
        (acc,) = running.acc
        return running._replace(acc=(_add_values(words, at, weights, acc, length, sizes, kind),))

    running = parts.start(queries.shape[0], [queries.shape[1]])
    turns = parts.trips(pl.cdiv(length, sizes.page) * sizes.rows, first, cut)
    parts.finish(jax.lax.fori_loop(0, turns, visit, running), out, lse, i, split, cut.queries)


def _rows(layer: Any, table: Any, i: Any, first: Any, length: Any, sizes: Sizes) -> Rows:
    """The rows of words from `first` on in the order of the list's table."""
    number = first + jnp.arange(sizes.cut.block)
    listed, row = jax.lax.div(number, sizes.rows), jax.lax.rem(number, sizes.rows)
    if sizes.payload == "uint2":
        within = [row * 8 + (n % 8 + n // 8 * (sizes.page // 2)) for n in range(16)]
    else:
        per = PER_WORD[sizes.payload]
        within = [row * per + n for n in range(per)]
    token = [listed * sizes.page + x for x in within]
    live = token[0] < length
    page = plt.load(table.at[i, listed], mask=live, other=0)
    return Rows(layer[0], page, row, live, token, within)


def _load_rows(words: Any, at: Rows, row: Any, lanes: int) -> Any:
    """Words [block, lanes] of the rows `row` of a step's pages, 0 where nothing counts."""
    width = words.shape[-1]
    lane = jnp.arange(lanes)
    rows, columns = parts.grid(row, lane)
    pages = parts.grid(at.page, lane)[0]
    wanted = at.live[:, None] & (lane < width)[None]
    return plt.load(words.at[at.layer, pages, rows, columns], mask=wanted, other=0)


def _number(words: Any, at: Rows, name: str, plane: int, length: Any, sizes: Sizes) -> Any:
    """What goes with the tokens of a plane, [block], 0 behind the length."""
    width, within = words.shape[-1], at.within[plane]
    row = _offset(name, width, sizes) + jax.lax.div(within, width)
    live = at.token[plane] < length
    ref = words.at[at.layer, at.page, row, jax.lax.rem(within, width)]
    return jax.lax.bitcast_convert_type(plt.load(ref, mask=live, other=0), jnp.float32)


def _offset(name: str, width: int, sizes: Sizes) -> int:
    """The first row of a page that holds the numbers `name`."""
    before = sizes.names[: sizes.names.index(name)]
    return 2 * sizes.rows + sum(1 if n in PER_CHANNEL else -(-sizes.page // width) for n in before)


def _scores(words: Any, at: Rows, q: Any, asked: Any, length: Any, sizes: Sizes, kind: Any) -> list[Any]:
    """Logits [queries, block] of every plane, -inf where a query does not see a token."""
    number = partial(_number, words, at, length=length, sizes=sizes)
    lanes, width = q.shape[1], words.shape[-1]
    codes = unpack(_load_rows(words, at, at.row, lanes), sizes.payload, kind)
    if "channel_scale" in sizes.names:
        scale, zero = (
            jax.lax.bitcast_convert_type(
                _load_rows(words, at, jnp.full_like(at.row, _offset(name, width, sizes)), lanes), jnp.float32
            )
            for name in PER_CHANNEL
        )
        codes = [(x.astype(jnp.float32) * scale + zero).astype(kind) for x in codes]
    found = []
    for plane, x in enumerate(codes):
        z = parts.product(q, x, 1)
        if "key_scale" in sizes.names:
            z = z * number("key_scale", plane)[None]
        if "key_zero" in sizes.names:
            z = z + q.astype(jnp.float32).sum(1)[:, None] * number("key_zero", plane)[None]
        z = z * sizes.scale
        if sizes.softcap is not None:
            z = sizes.softcap * jnp.tanh(z / sizes.softcap)
        if "bias" in sizes.names:
            z = z + number("bias", plane)[None]
        seen = (at.token[plane] < length)[None]
        if "pos" in sizes.names:
            pos, now = number("pos", plane)[None], asked.astype(jnp.float32)[:, None]
            seen = seen & (pos >= 0.0) & (pos <= now)
            if sizes.window is not None:
                seen = seen & (pos > now - sizes.window)
        found.append(jnp.where(seen, z, NEG_INF))
    return found


def _add_values(
    words: Any, at: Rows, weights: list[Any], acc: Any, length: Any, sizes: Sizes, kind: Any
) -> Any:
    """acc and the values of a step weighted."""
    codes = unpack(_load_rows(words, at, at.row + sizes.rows, acc.shape[1]), sizes.payload, kind)
    for plane, (p, x) in enumerate(zip(weights, codes, strict=True)):
        if "value_zero" in sizes.names:
            acc = acc + (p * _number(words, at, "value_zero", plane, length, sizes)[None]).sum(1)[:, None]
        if "value_scale" in sizes.names:
            p = p * _number(words, at, "value_scale", plane, length, sizes)[None]
        if sizes.payload in ("bfloat16", *FLOAT8):
            # A word's later tokens may lie behind the length, and zero times anything may be no number.
            x = jnp.where((at.token[plane] < length)[:, None], x, jnp.zeros((), kind))
        acc = acc + parts.product(p.astype(kind), x, 0)
    return acc


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
    """Parts (out [I, C, R, W'], lse [I, C, R]) of I lists in C splits, and logits [I, R, S] for the mass.

    q [I, R, W'] with R and W' powers of two from 16, W' at least W; words [L, P, rows, W] int32; table [I, M]
    with pages, or anything, for all C splits; lengths [I]; q_pos [I, R]; layer [1]. Rows of out and of the
    logits behind the real queries are not written, nor are logits behind a list's length.
    """
    (lists, count, lanes), cut = q.shape, sizes.cut
    rows = cut.splits * cut.blocks * cut.block
    if table.shape[1] * sizes.rows < rows:
        raise ValueError(f"tables of {table.shape[1]} pages are shorter than {rows} rows of words: pad them")
    shapes = [(lists, cut.splits, count, lanes), (lists, cut.splits, count)]
    if sizes.mass:
        shapes.append((lists, count, table.shape[1] * sizes.page))
    made = parts.call(partial(_kernel, sizes=sizes), cut, shapes, "paged_decode", interpret)
    return tuple(made(layer, lengths, table, q_pos, q, words))
