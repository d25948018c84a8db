"""The GPU kernel of decoding over consecutive slots, in the rows of one array for all layers.

The first row of a KV head is a number that the kernel reads, so that nothing is ever sliced out of the array:
what `kernel_tpu.py` does for a TPU, split over many programs (`partial_gpu`). The result is defined by
`ops.decode.stacked_decode`, `kvjax.ops.decode.ragged_decode` and `kvjax.ops.decode.picked_decode`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kvjax.pallas_kernels import partial_gpu as parts
from kvjax.pallas_kernels.halves import halves
from kvjax.pallas_kernels.partial_gpu import NEG_INF, Cut
from kvjax.pallas_kernels.rotation import RotatedChannels, rotated_pairs, waves

# Codes are used as code - MIDDLE, a signed number that a GPU widens directly.
MIDDLE = 128


class Sizes(NamedTuple):
    """Static arguments: how the work is split, and the logits' parameters.

    packed: whether rows of keys hold the values too. sides: the names of per-slot numbers, as for a TPU.
    mass: slots whose logits to write; 0 for none. page: how many slots are consecutive; 0 if all of a head
    are. rotated: which channels of keys the kernel rotates, by their side "phase".
    """

    cut: Cut
    scale: float
    window: int | None = None
    softcap: float | None = None
    packed: bool = False
    sides: tuple[str, ...] = ()
    mass: int = 0
    page: int = 0
    rotated: RotatedChannels | None = None


def _kernel(layer, lengths, origins, q_pos, q, *refs, sizes: Sizes) -> None:
    many, rest = [2 if sizes.rotated else 0, len(sizes.sides), 1 if sizes.packed else 2], list(refs)
    angles, slots, caches = ([rest.pop(0) for _ in range(n)] for n in many)
    sides, (out, lse, *logits) = dict(zip(sizes.sides, slots, strict=True)), rest
    i, split, cut = pl.program_id(0), pl.program_id(1), sizes.cut
    length, first = lengths[i], split * (cut.blocks * cut.block)
    kind = jnp.float32 if q.dtype == jnp.float32 else jnp.bfloat16
    asked, queries = q_pos[i], q[i].astype(kind)

    def visit(step: Any, running: parts.Running) -> parts.Running:
        slot = first + step * cut.block + jnp.arange(cut.block)
        live = slot < length
        row = _rows(origins, i, slot, live, sizes.page)
        given = {n: _side(x, layer, i, slot, live, queries.shape[0]) for n, x in sides.items()}
        load = partial(_load, caches[0], layer, row, live, kind=kind)
        keys = load(queries.shape[1])
        if sizes.rotated is None:
            z = _product(queries, keys, given)
        else:
            z = _rotated_logits(
                [angles[0][i, n].astype(kind) for n in range(2)], angles[1][...], load, given, sizes.rotated
            )
            if sizes.rotated.start or 2 * sizes.rotated.half < caches[0].shape[2]:
                z = z + _product(queries, keys, given)
        z = _logits(z, given, sizes)
        z = jnp.where(_seen(given, asked, slot, live, sizes.window), z, NEG_INF)
        if sizes.mass:
            parts.keep_logits(logits[0], i, z, slot, live, cut.queries)
        running, (p,) = parts.weigh(running, z)
        lanes = running.acc[0].shape[1]
        values = keys if sizes.packed else _load(caches[1], layer, row, live, lanes, kind=kind)
        return running._replace(acc=(running.acc[0] + _weighted(p, values, given, sizes),))

    running = parts.nothing_yet(queries.shape[0], [out.shape[3]])
    running = jax.lax.fori_loop(0, parts.trips(length, first, cut), visit, running)
    parts.finish(running, out, lse, i, split, cut.queries)


def _rows(origins: Any, i: Any, slot: Any, live: Any, page: int) -> Any:
    """Load the rows of slots of head i."""
    if not page:
        return origins[i, 0] + slot
    first = plt.load(origins.at[i, jax.lax.div(slot, page)], mask=live, other=0)
    return first + jax.lax.rem(slot, page)


def _side(side: Any, layer: Any, i: Any, slot: Any, live: Any, queries: int) -> Any:
    """Per-slot numbers, [block], or per query and slot, [R, block]."""
    at = layer[0] if side.shape[0] > 1 else 0
    if len(side.shape) == 3:
        return plt.load(side.at[at, i, slot], mask=live, other=0)
    row = jnp.arange(queries)
    there = (row < side.shape[2])[:, None] & live[None]
    return plt.load(side.at[at, i, *parts.grid(row, slot)], mask=there, other=0)


def _load(
    cache: Any, layer: Any, row: Any, live: Any, lanes: int, first: int = 0, last: int = 0, *, kind: Any
) -> Any:
    """Rows [block, lanes] for the matrix units, 0 where nothing counts; codes minus MIDDLE.

    Channels are those from `first` to `last`, or to the end.
    """
    lane, last = jnp.arange(lanes), last or cache.shape[2]
    wanted = jnp.broadcast_to(live[:, None], (row.shape[0], lanes))
    if last - first < lanes:
        wanted = wanted & (lane < last - first)[None]
    x = plt.load(cache.at[layer[0], *parts.grid(row, first + lane)], mask=wanted, other=0)
    if cache.dtype == jnp.uint8:
        x = (x ^ jnp.uint8(MIDDLE)).astype(jnp.int8)
    return x.astype(kind)


def _product(q: Any, keys: Any, given: dict[str, Any]) -> Any:
    """Multiply queries [R, W'] with unrotated or already rotated keys."""
    z = parts.product(q, keys, 1)
    if "key_scale_zero" not in given:
        return z
    scale, zero = halves(given["key_scale_zero"])
    return z * scale[None] + q.astype(jnp.float32).sum(1)[:, None] * (zero + MIDDLE * scale)[None]


def _rotated_logits(
    q: list[Any], angles: Any, load: Callable[..., Any], given: dict[str, Any], rotated: RotatedChannels
) -> Any:
    """Multiply queries' channel pairs, twice [R, P], with those of keys, rotated by their phases."""
    at = [rotated.start + n * rotated.half for n in range(3)]
    pairs = [load(angles.shape[0], *ends).astype(jnp.float32) for ends in itertools.pairwise(at)]
    if "key_scale_zero" in given:
        scale, zero = halves(given["key_scale_zero"])
        pairs = [x * scale[:, None] + (zero + MIDDLE * scale)[:, None] for x in pairs]
    units = given["phase"][:, None] * angles[None]
    found = rotated_pairs(pairs[0], pairs[1], waves(units, q[0].dtype, rotated.amplitude))
    one, other = (parts.product(x, y.astype(x.dtype), 1) for x, y in zip(q, found, strict=True))
    return one + other


def _logits(z: Any, given: dict[str, Any], sizes: Sizes) -> Any:
    z = z * sizes.scale
    if "key_size" in given:
        z = z * given["key_size"].astype(jnp.float32)[None]
    if sizes.softcap is not None:
        z = sizes.softcap * jnp.tanh(z / sizes.softcap)
    if "bias" not in given:
        return z
    bias = given["bias"].astype(jnp.float32)
    return z + (bias if bias.ndim == 2 else bias[None])


def _seen(given: dict[str, Any], asked: Any, slot: Any, live: Any, window: int | None) -> Any:
    """Which slots a query sees, [R, block]."""
    pos, now = given.get("pos", slot)[None], asked[:, None]
    seen = live[None] & (pos >= 0) & (pos <= now)
    return seen if window is None else seen & (pos > now - window)


def _weighted(p: Any, values: Any, given: dict[str, Any], sizes: Sizes) -> Any:
    if "value_size" in given:
        p = p * given["value_size"].astype(jnp.float32)[None]
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
    angles: tuple[jax.Array, ...] = (),
    *,
    sizes: Sizes,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Parts (out [I, C, Q, V'], lse [I, C, R]) of I KV heads in C splits, and logits [I, Q, S] for mass.

    q [I, R, W'] with R and W' powers of two from 16; k [L, M, W] and v [L, M, V], uint8 if they are codes, of
    at most W' and V' channels, V' a power of two; v None: rows of k hold both, and V' is W'. lengths [I];
    origins [I, 1], the row of a head's first slot, or [I, P], those of its pages; q_pos [I, R]; sides [1 or
    L, I, S], and a bias of every query [1, I, Q, S]; layer [1]. angles, if keys are to be rotated: the
    queries' pairs of channels [I, 2, R, P], which are zeros in q, and their angle per step of a phase [P], in
    units of 2^-32 of a full turn. Q are the real queries; logits after a head's length are not written.
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
    return tuple(made(layer, lengths, origins, q_pos, q, *angles, *sides, *caches))
