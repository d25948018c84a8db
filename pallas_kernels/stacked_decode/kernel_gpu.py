"""The GPU kernel of decoding over slots that lie behind each other, in the rows of one array for all layers.

Where a list begins is a number that the kernel reads, so that nothing is ever sliced out of the array: what
`kernel_tpu.py` beside this does for a TPU, split over many programs (`partial_gpu`). What it computes is
defined by `ops.decode.stacked_decode`, `kvjax.ops.decode.ragged_decode` and `kvjax.ops.decode.picked_decode`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kvjax.pallas_kernels import partial_gpu as parts
from kvjax.pallas_kernels.halves import halves
from kvjax.pallas_kernels.partial_gpu import NEG_INF, Cut

# Codes are taken as code - MIDDLE, which a GPU widens as it is: signed.
MIDDLE = 128


class Sizes(NamedTuple):
    """What is static: how the work is cut, and what is done to the logits.

    packed: whether rows of keys hold the values too. sides: what is given per slot, as for a TPU. mass: slots
    whose logits to write; 0 for none. page: slots that lie behind each other; 0 where all of a list do.
    """

    cut: Cut
    scale: float
    window: int | None = None
    softcap: float | None = None
    packed: bool = False
    sides: tuple[str, ...] = ()
    mass: int = 0
    page: int = 0


def _kernel(layer, lengths, origins, q_pos, q, *refs, sizes: Sizes) -> None:
    many = len(sizes.sides), 1 if sizes.packed else 2
    sides, caches = dict(zip(sizes.sides, refs, strict=False)), refs[many[0] : sum(many)]
    out, lse, *logits = refs[sum(many) :]
    i, split, cut = pl.program_id(0), pl.program_id(1), sizes.cut
    length, first = lengths[i], split * (cut.blocks * cut.block)
    kind = jnp.float32 if q.dtype == jnp.float32 else jnp.bfloat16
    asked, queries = q_pos[i], q[i].astype(kind)

    def visit(step: Any, running: parts.Running) -> parts.Running:
        slot = first + step * cut.block + jnp.arange(cut.block)
        live = slot < length
        row = _rows(origins, i, slot, live, sizes.page)
        given = {n: _side(x, layer, i, slot, live) for n, x in sides.items()}
        keys = _load(caches[0], layer, row, live, queries.shape[1], kind)
        z = _logits(queries, keys, given, sizes)
        z = jnp.where(_seen(given, asked, slot, live, sizes.window), z, NEG_INF)
        if sizes.mass:
            parts.keep_logits(logits[0], i, z, slot, live, cut.queries)
        running, (p,) = parts.weigh(running, z)
        lanes = running.acc[0].shape[1]
        values = keys if sizes.packed else _load(caches[1], layer, row, live, lanes, kind)
        return running._replace(acc=(running.acc[0] + _weighted(p, values, given, sizes),))

    running = parts.nothing_yet(queries.shape[0], [out.shape[3]])
    running = jax.lax.fori_loop(0, parts.trips(length, first, cut), visit, running)
    parts.finish(running, out, lse, i, split, cut.queries)


def _rows(origins: Any, i: Any, slot: Any, live: Any, page: int) -> Any:
    """The rows where slots of list i lie."""
    if not page:
        return origins[i, 0] + slot
    first = plt.load(origins.at[i, jax.lax.div(slot, page)], mask=live, other=0)
    return first + jax.lax.rem(slot, page)


def _side(side: Any, layer: Any, i: Any, slot: Any, live: Any) -> Any:
    at = layer[0] if side.shape[0] > 1 else 0
    return plt.load(side.at[at, i, slot], mask=live, other=0)


def _load(cache: Any, layer: Any, row: Any, live: Any, lanes: int, kind: Any) -> Any:
    """Rows [block, lanes] for the matrix units, 0 where nothing counts; codes less MIDDLE."""
    lane = jnp.arange(lanes)
    wanted = jnp.broadcast_to(live[:, None], (row.shape[0], lanes))
    if cache.shape[2] < lanes:
        wanted = wanted & (lane < cache.shape[2])[None]
    x = plt.load(cache.at[layer[0], *parts.grid(row, lane)], mask=wanted, other=0)
    if cache.dtype == jnp.uint8:
        x = (x ^ jnp.uint8(MIDDLE)).astype(jnp.int8)
    return x.astype(kind)


def _logits(q: Any, keys: Any, given: dict[str, Any], sizes: Sizes) -> Any:
    z = parts.product(q, keys, 1)
    if "key_scale_zero" in given:
        scale, zero = halves(given["key_scale_zero"])
        z = z * scale[None] + q.astype(jnp.float32).sum(1)[:, None] * (zero + MIDDLE * scale)[None]
    z = z * sizes.scale
    if sizes.softcap is not None:
        z = sizes.softcap * jnp.tanh(z / sizes.softcap)
    return z + given["bias"].astype(jnp.float32)[None] if "bias" in given else z


def _seen(given: dict[str, Any], asked: Any, slot: Any, live: Any, window: int | None) -> Any:
    """Which slots a query sees, [R, block]."""
    pos, now = given.get("pos", slot)[None], asked[:, None]
    seen = live[None] & (pos >= 0) & (pos <= now)
    return seen if window is None else seen & (pos > now - window)


def _weighted(p: Any, values: Any, given: dict[str, Any], sizes: Sizes) -> Any:
    whose = f"{'key' if sizes.packed else 'value'}_scale_zero"
    if whose not in given:
        return parts.product(p.astype(values.dtype), values, 0)
    scale, zero = halves(given[whose])
    own = (p * (zero + MIDDLE * scale)[None]).sum(1)[:, None]
    return parts.product((p * scale[None]).astype(values.dtype), values, 0) + own


def stacked_decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    lengths: jax.Array,
    origins: jax.Array,
    q_pos: jax.Array,
    layer: jax.Array,
    sides: tuple[jax.Array, ...] = (),
    *,
    sizes: Sizes,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Parts (out [I, C, Q, V'], lse [I, C, R]) of I lists in C splits, and logits [I, Q, S] for the mass.

    q [I, R, W'] with R and W' powers of two from 16; k [L, M, W] and v [L, M, V], uint8 where they are codes,
    of at most W' and V' channels, V' a power of two; v None: rows of k hold both, and V' is W'. lengths [I];
    origins [I, 1], the row of a list's first slot, or [I, P], those of its pages; q_pos [I, R]; sides
    [1 or L, I, S]; layer [1]. Q are the real queries; logits behind a list's length are not written.
    """
    lists, count, lanes = q.shape
    values = lanes if v is None else max(parts.SMALLEST, 1 << (v.shape[2] - 1).bit_length())
    cut = sizes.cut
    shapes = [(lists, cut.splits, cut.queries, values), (lists, cut.splits, count)]
    if sizes.mass:
        shapes.append((lists, cut.queries, sizes.mass))
    kernel = partial(_kernel, sizes=sizes)
    caches = (k,) if v is None else (k, v)
    made = parts.call(kernel, cut, shapes, "stacked_decode", interpret)
    return tuple(made(layer, lengths, origins, q_pos, q, *sides, *caches))
