"""The TPU kernel of decoding over consecutive slots, in the rows of one array for all layers.

The layer and the first row of every KV head are scalars that the kernel gets before its grid starts, so that
nothing is sliced out of the array. A step copies a block of one head's slots, and of the last block only
the pieces up to the head's length. Three operations use this kernel: `ops.decode.stacked_decode`, where
all heads have equally many slots, `ops.decode.ragged_decode`, where each has the rows it needs, and
`ops.decode.picked_decode`, where a head is pages picked from a longer one.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas_kernels import streaming
from kvjax.pallas_kernels.halves import halves
from kvjax.pallas_kernels.rotation import RotatedChannels, logits_of_channels, rotated_logits
from kvjax.pallas_kernels.streaming import LANES, NEG_INF, Running

# Codes are used as code - MIDDLE: small numbers around zero, whose sums keep their precision.
MIDDLE = 128


class Sizes(NamedTuple):
    """Static arguments: slots per step and per piece of one, heads per core, and the logits' parameters.

    packed: whether rows of keys hold the values too. sides: the names of per-slot numbers, among "pos",
    "bias", "phase", "key_size" and "value_size", which multiply rows, and for codes "key_scale_zero" and
    "value_scale_zero". rotated: which channels of keys the kernel rotates, by "phase". mass: slots, in whole
    blocks, whose received probability is written; 0 for none. lanes: for every cache, whether its slots are
    on the lanes and its channels on the sublanes. pages: how many pieces of a head have a first row of their
    own; 0 if they are consecutive.
    """

    block: int
    piece: int
    lists: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    packed: bool = False
    sides: tuple[str, ...] = ()
    mass: int = 0
    lanes: tuple[bool, ...] = (False, False)
    pages: int = 0
    rotated: RotatedChannels | None = None


class BlockOperands(NamedTuple):
    """The operands of a block: queries, their positions, sides by name, buffers, and logits to keep.

    angles: the angle of the channel pairs per step of a phase, if keys are to be rotated.
    """

    q: Any
    q_pos: Any
    sides: dict[str, Any]
    buffers: list[Any]
    scores: list[Any]
    angles: list[Any]


def _kernel(layer: Any, lengths: Any, begins: Any, origins: Any, *refs: Any, sizes: Sizes) -> None:
    many = 1 if sizes.packed else 2
    cuts = [2, 1 if sizes.rotated else 0, len(sizes.sides), many, 3 if sizes.mass else 2]
    rest = list(refs)
    (q, q_pos), angles, sides, caches, (out, lse, *mass) = ([rest.pop(0) for _ in range(n)] for n in cuts)
    scores = [rest.pop()] if sizes.mass else []
    *buffers, turn, arrived, top, total, acc = rest
    j = pl.program_id(1)
    mine = pl.program_id(0) * sizes.lists + j
    more = j + 1 < sizes.lists
    at = (mine, jnp.where(more, mine + 1, mine))
    length, block, piece = [lengths[i] for i in at], sizes.block, sizes.piece
    # A head begins at one row, or every piece of it at its own.
    origin = [i * sizes.pages if sizes.pages else origins[i] for i in at]

    def copies(ahead: Any, s: Any, slot: Any, act: Any) -> None:
        def some(first: Any, count: int) -> None:
            begin, here = pl.multiple_of(s * block + first, piece), pl.ds(first, count)
            row = streaming.pick(ahead, *origin)
            row = origins[row + begin // piece] if sizes.pages else row + begin
            row = pl.multiple_of(row, piece)
            for cache, buffer, lanes in zip(caches, buffers, sizes.lanes, strict=False):
                if lanes:
                    source = cache.at[layer[0], streaming.pick(ahead, *at), :, pl.ds(begin, count)]
                    target = buffer.at[slot, :, here]
                else:
                    source, target = cache.at[layer[0], pl.ds(row, count)], buffer.at[slot, here]
                act(pltpu.make_async_copy(source, target, arrived.at[slot]))

        def one(n: Any) -> None:
            some(pl.multiple_of(n * piece, piece), piece)

        def everything() -> None:
            if not sizes.pages:
                return some(0, block)
            for n in range(block // piece):
                some(n * piece, piece)

        live = jnp.clip(pl.cdiv(streaming.pick(ahead, *length) - s * block, piece), 0, block // piece)
        streaming.each(live, block // piece, everything, one)

    running = Running(top, total, acc)
    streaming.clear(running)
    given = BlockOperands(q, q_pos, dict(zip(sizes.sides, sides, strict=True)), buffers, scores, angles)
    span = begins[at[0]], pl.cdiv(length[0], block)
    visit = partial(_attend, given, running, sizes, mine, length[0])
    streaming.stream(turn, span, begins[at[1]], more, copies, visit)
    streaming.finish(running, out, lse)
    for kept, into in zip(scores, mass, strict=True):
        streaming.spread(kept, lse, into, span, block)


def _attend(
    given: BlockOperands, running: Running, sizes: Sizes, mine: Any, length: Any, s: Any, slot: Any
) -> None:
    """Fold block `s` of head `mine`, which is in buffer `slot`, into the running softmax."""
    block, keys, values = sizes.block, given.buffers[0], given.buffers[-1]
    across = int(sizes.lanes[len(given.buffers) - 1])
    if jnp.issubdtype(values.dtype, jnp.floating):
        _blank(values, slot, sizes, length - s * block, across)
    asked = given.q[0]
    kind = jnp.float32 if asked.dtype == jnp.float32 else jnp.bfloat16
    k, v = (_widened(b[slot], kind) for b in (keys, values))
    side = {n: _row(x, mine, s, block) for n, x in given.sides.items()}
    z = (
        _rotated_logits(asked, k, side, given.angles, sizes)
        if sizes.rotated
        else _product(asked, k, side, sizes)
    )
    z = z * sizes.scale
    if "key_size" in side:
        z = z * side["key_size"]
    if sizes.softcap is not None:
        z = sizes.softcap * jnp.tanh(z / sizes.softcap)
    if "bias" in side:
        z = z + side["bias"]
    z = jnp.where(_seen(given, side, sizes, s, length), z, NEG_INF)
    for kept in given.scores:
        kept[:, pl.ds(pl.multiple_of(s * block, block), block)] = z
    p, fade = streaming.weigh(running, z)
    if "value_size" in side:
        p = jnp.where(p == 0.0, 0.0, p * side["value_size"])
    whose = f"{'key' if sizes.packed else 'value'}_scale_zero"
    if whose not in side:
        own = streaming.product(p.astype(kind), v, across)
    else:
        scale, zero = halves(side[whose])
        own = streaming.product((p * scale).astype(kind), v, 0)
        own = own + (p * (zero + MIDDLE * scale)).sum(-1, keepdims=True)
    running.acc[...] = running.acc[...] * fade + own


def _product(asked: Any, k: Any, side: dict[str, Any], sizes: Sizes) -> Any:
    """Multiply queries [R, W] with keys, without rotation."""
    z = streaming.product(asked.astype(k.dtype), k, 0 if sizes.lanes[0] else 1)
    if "key_scale_zero" not in side:
        return z
    scale, zero = halves(side["key_scale_zero"])
    return z * scale + asked.astype(jnp.float32).sum(-1, keepdims=True) * (zero + MIDDLE * scale)


def _rotated_logits(asked: Any, k: Any, side: dict[str, Any], angles: list[Any], sizes: Sizes) -> Any:
    """Multiply queries [R, W] with keys rotated by their phases, a tile of slots at a time."""
    assert sizes.rotated is not None
    phase, (steps,) = side["phase"], (x[...] for x in angles)
    if not sizes.lanes[0]:
        numbers: dict[str, Any] = {}
        if "key_scale_zero" in side:
            scale, zero = halves(side["key_scale_zero"])
            numbers = {"key_scale": scale, "key_zero": zero + MIDDLE * scale}
        pages = k.reshape(-1, LANES, k.shape[1])
        return rotated_logits(asked, pages, numbers, phase, steps, sizes.rotated)
    found = []
    for n in range(0, k.shape[1], LANES):
        at = slice(n, n + LANES)
        keys = k[:, at].astype(jnp.float32)
        found.append(logits_of_channels(asked, keys, phase[:, at], steps, sizes.rotated, k.dtype))
    return jnp.concatenate(found, axis=1)


def _blank(values: Any, slot: Any, sizes: Sizes, live: Any, across: int) -> None:
    def piece(n: Any) -> Any:
        slots = pl.ds(pl.multiple_of(n * sizes.piece, sizes.piece), sizes.piece)
        return values.at[slot, :, slots] if across else values.at[slot, slots]

    streaming.blank(piece, sizes.piece, sizes.block // sizes.piece, live, across)


def _seen(given: BlockOperands, side: dict[str, Any], sizes: Sizes, s: Any, length: Any) -> Any:
    """Which slots of a block [R, block] a query sees."""
    slot_of = jax.lax.broadcasted_iota(jnp.int32, (1, sizes.block), 1) + s * sizes.block
    pos, asked_pos = side.get("pos", slot_of), given.q_pos[0][:, :1]
    seen = (pos <= asked_pos) & (slot_of < length)
    if "pos" in side:
        seen &= pos >= 0
    return seen if sizes.window is None else seen & (pos > asked_pos - sizes.window)


def _widened(x: Any, kind: Any) -> Any:
    """Rows for the matrix unit; codes minus MIDDLE, which flips one bit of each, in words of four."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(kind)
    words = pltpu.bitcast(x, jnp.int32) ^ jnp.int32(-0x7F7F7F80)
    return pltpu.bitcast(words, jnp.int8).astype(kind)


def _row(side: Any, mine: Any, s: Any, block: int) -> Any:
    """Load the numbers of a block's slots, [1, block], of a side [1, 1, K, S] of all heads."""
    head = jax.lax.rem(mine, side.shape[2])
    return side[0, 0, pl.ds(head, 1), pl.ds(pl.multiple_of(s * block, block), block)]


def _spec_of_heads(side: jax.Array, lists: int) -> pl.BlockSpec:
    """Return all heads of a sequence, copied once for all of them; `lists` heads are visited per core."""

    def at(core: Any, j: Any, layer: Any, *_: Any) -> tuple[Any, ...]:
        return (layer[0] if side.shape[0] > 1 else 0, (core * lists + j) // side.shape[2], 0, 0)

    return pl.BlockSpec((1, 1, *side.shape[2:]), at)


def stacked_decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    lengths: jax.Array,
    begins: jax.Array,
    origins: jax.Array,
    q_pos: jax.Array,
    layer: jax.Array,
    sides: tuple[jax.Array, ...] = (),
    angles: tuple[jax.Array, ...] = (),
    *,
    sizes: Sizes,
    cores: int = 1,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """(out [I, R, V], lse [I, R, 128], mass [I, 1, sizes.mass] if requested) of I KV heads.

    q [I, R, W] with R a multiple of 8; k [L, M, W] and v [L, M, V] with W and V multiples of 128, uint8 if
    they are codes; v None: rows of k hold keys and values, V = W. lengths [I]; begins [I], the first block
    that is visited; origins [I], the row of a head's first slot, a multiple of the piece, as is M, or [I *
    sizes.pages], the rows of all pieces; q_pos [I, R, 128] int32, -1 if a row is not a query; sides [1 or L,
    B, K, S'] with S' the slots of whole blocks; angles, if keys are to be rotated, one [half, 128] as
    `rotated_logits` takes it; layer [1]. Mass of blocks that are not visited is not written. A cache with its
    slots on the lanes is [L, I, W, S], W of any whole tiles and S a multiple of 128.
    """
    lists, count, width = q.shape
    caches = (k,) if v is None else (k, v)
    shapes = [
        (x.shape[2], sizes.block) if lanes else (sizes.block, x.shape[2])
        for x, lanes in zip(caches, sizes.lanes, strict=False)
    ]
    values = caches[-1].shape[2]
    of = partial(streaming.spec_of_list, lists, sizes.lists)
    masses = [jax.ShapeDtypeStruct((lists, 1, sizes.mass), jnp.float32)] if sizes.mass else []
    return pl.pallas_call(
        partial(_kernel, sizes=sizes),
        out_shape=[
            jax.ShapeDtypeStruct((lists, count, values), q.dtype),
            jax.ShapeDtypeStruct((lists, count, LANES), jnp.float32),
            *masses,
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(cores, sizes.lists),
            in_specs=[
                of(count, width),
                of(count, LANES),
                *(pl.BlockSpec(x.shape, lambda *_: (0, 0)) for x in angles),
                *(_spec_of_heads(x, sizes.lists) for x in sides),
                *[pl.BlockSpec(memory_space=pl.ANY)] * len(caches),
            ],
            out_specs=[of(count, values), of(count, LANES), *(of(*x.shape[1:]) for x in masses)],
            scratch_shapes=[
                *(pltpu.VMEM((2, *shape), x.dtype) for x, shape in zip(caches, shapes, strict=True)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((count, LANES), jnp.float32),
                pltpu.VMEM((count, LANES), jnp.float32),
                pltpu.VMEM((count, values), jnp.float32),
                *(pltpu.VMEM((count, sizes.mass), jnp.float32) for _ in masses),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="stacked_decode",
    )(layer, lengths, begins, origins, q, q_pos, *angles, *sides, *caches)
