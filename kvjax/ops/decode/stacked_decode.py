"""Attention of a few queries over the stacked cache of all layers: [L, B, K, S, H].

A layer scan carries the cache; slicing a layer out of it copies that layer, once per layer and token. So the
operation takes the whole array and the index of the layer.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8, UInt32

from kvjax.ops.base.bit_packing import halves
from kvjax.ops.base.dispatch import form
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.softmax import softmax
from kvjax.ops.decode.append import append
from kvjax.ops.decode.rotation import KeyRotation, in_kernel, no_tiles, rotated_channels, rotated_keys
from kvjax.ops.decode.rotation import refusal as no_rotation
from kvjax.ops.decode.stacked_decode_gpu import gpu_refusal, gpu_stacked_decode
from kvjax.pallas_kernels.block_sizes import cores_for, tuned
from kvjax.pallas_kernels.stacked_decode import kernel_tpu as tpu
from kvjax.pallas_kernels.streaming import LANES, SUBLANES

# Per-slot numbers of a sequence, in two buffers, and the logits kept for mass: 12 MiB of VMEM.
KEPT_NUMBERS = 3 * 2**20


# Factors on the keys and the values of every slot of the layer, [B, K, S] each.
Factors = tuple[Array | None, Array | None]


class CodedSlots(NamedTuple):
    """Rows as 8-bit codes, each with a scale and a zero (`bit_packing.pair`): x = scale * code + zero."""

    codes: UInt8[Array, "L B K S W"]
    scale_zero: UInt32[Array, "L B K S"]


def stacked_decode(
    q: Float[Array, "B N T H"],
    k: Float[Array, "L B K S W"] | CodedSlots,
    v: Float[Array, "L B K S X"] | CodedSlots | None,
    lengths: Int[Array, " B"] | Int[Array, "B K"],
    q_pos: Int[Array, "B T"],
    layer: int | Int[Array, ""] = 0,
    *,
    scale: float,
    pos: Int[Array, "L B K S"] | None = None,
    bias: Float[Array, "L B K S"] | None = None,
    sizes: Factors = (None, None),
    rotation: KeyRotation | None = None,
    values: int | None = None,
    first: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    mass: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"], Float[Array, "B K S"] | None]:
    """Exact attention over the first `lengths` slots of layer `layer`: (out, lse, mass).

    A query at q_pos sees positions q_pos - window + 1 .. q_pos; slot s holds position s unless `pos` is
    given, where -1 is an empty slot. bias is added to the logits. sizes: factors on the keys and the values
    of every slot of the layer. rotation: how keys that are stored unrotated are rotated; queries are given
    rotated. lse is -inf, and out 0, if nothing is visible. mass: the probability of every slot, summed over
    the queries of its KV head. Softmax in promote(float32, q).

    Rows may be wider than the H channels of keys and the `values` channels (H unless given) of values, which
    come first; the padding must be finite. v None: rows of k hold both, the values from channel `first` on,
    which is H unless given, so that keys and values of 64 fill a row of 128; 0 is for latents. Keys, values
    or both may be `CodedSlots`: scale (q . c) + zero sum(q), and sum_s p scale c + sum_s p zero. Rows after
    the length are never read.

    implementation: "reference", "tpu", "gpu", or these two with " interpret"; None takes the kernel if it can
    run. Raises NotImplementedError if a forced one cannot, ValueError if shapes do not fit.

    >>> k = jnp.ones((3, 1, 2, 16, 8))
    >>> q, length, pos = jnp.zeros((1, 4, 1, 8)), jnp.asarray([6]), jnp.asarray([[5]])
    >>> out, lse, _ = stacked_decode(q, k, k, length, pos, layer=2, scale=1.0)
    >>> out[0, 0, 0, 0].item(), round(float(jnp.exp(lse[0, 0, 0])))
    (1.0, 6)
    """
    b, n, _, h = q.shape
    width = h if values is None else values
    start = (h if v is None else 0) if first is None else first
    keys, rows = rows_of(k), rows_of(k if v is None else v)
    fit = keys.shape[1] == b and n % keys.shape[2] == 0 and keys.shape[:-1] == rows.shape[:-1]
    if not fit or h > keys.shape[-1] or width > rows.shape[-1] - start:
        raise ValueError(
            f"q {list(q.shape)}, k {list(keys.shape)}, v {v if v is None else list(rows.shape)} and {width} "
            "values do not fit: expected as many sequences, KV heads that divide query heads, rows as wide"
        )
    at = jnp.asarray(layer, jnp.int32)
    lists = jnp.broadcast_to(lengths.reshape(b, -1), keys.shape[1:3]).astype(jnp.int32)
    options: dict[str, Any] = dict(scale=scale, values=(start, width), window=window, softcap=softcap)
    sides: dict[str, Any] = dict(pos=pos, bias=bias, sizes=sizes, rotation=rotation)
    options |= dict(mass=mass, **sides)
    chosen = form("stacked_decode", implementation, q, k, v, **refusals(q, k, v, mass=mass, **sides))
    if chosen == "reference":
        return _reference(q, k, v, lists, q_pos, at, **options)
    if chosen.startswith("gpu"):
        return _on_gpu(q, k, v, lists, q_pos, at, interpret=chosen != "gpu", **options)
    return tpu_stacked_decode(q, k, v, lists, q_pos, at, interpret=chosen != "tpu", **options)


def rows_of(x: Array | CodedSlots) -> Array:
    """Return the rows of a cache, unencoded or in codes."""
    return x.codes if isinstance(x, CodedSlots) else x


def sides_of(
    k: Array | CodedSlots, v: Array | CodedSlots | None, pos: Array | None, bias: Array | None,
    sizes: Factors = (None, None), rotation: KeyRotation | None = None,
) -> dict[str, Array]:  # fmt: skip
    """Per-slot numbers, [1 or L, B, K, S], by the names of the kernel."""
    given = {"pos": pos, "bias": bias}
    given |= {f"{n}_size": x[None] for n, x in zip(("key", "value"), sizes, strict=True) if x is not None}
    if rotation is not None and rotated_channels(rotation.rope, rows_of(k).shape[-1]) is not None:
        given["phase"] = rotation.phase[None]
    for name, x in {"key": k, "value": v}.items():
        if isinstance(x, CodedSlots):
            given[f"{name}_scale_zero"] = x.scale_zero
    return {name: x for name, x in given.items() if x is not None}


def refusals(
    q: Array, k: Array | CodedSlots, v: Array | CodedSlots | None, pos: Array | None, bias: Array | None,
    sizes: Factors = (None, None), rotation: KeyRotation | None = None, *, mass: bool = False,
) -> dict[str, str]:  # fmt: skip
    """Why the kernel of each platform cannot take these operands."""
    rows = (rows_of(k), None if v is None else rows_of(v))
    why = "" if rotation is None else no_rotation(rotation.rope)
    if sizes[1] is not None and v is None:
        why = why or "factors of values that are channels of the keys"
    if why:
        return dict(tpu=why, gpu=why)
    sides = sides_of(k, v, pos, bias, sizes, rotation)
    return dict(tpu=refusal(q, k, v, sides, rotation, mass=mass), gpu=gpu_refusal(q, rows[0].shape[2], *rows))


def refusal(
    q: Array, k: Array | CodedSlots, v: Array | CodedSlots | None, given: dict[str, Array],
    rotation: KeyRotation | None, *, mass: bool = False,
) -> str:  # fmt: skip
    """Why the TPU kernel cannot take these operands; empty if it can. given: the result of `sides_of`."""
    heads, slots = rows_of(k).shape[2:4]
    queries = -(-q.shape[1] // heads * q.shape[2] // SUBLANES) * SUBLANES if mass else 0
    if (2 * len(given) * heads + queries) * slots > KEPT_NUMBERS:
        return (
            f"{', '.join(given) or 'nothing'} of {heads} heads twice and mass of {queries} queries x {slots} "
            f"slots, expected at most {KEPT_NUMBERS} numbers"
        )
    if rotation is not None and (why := no_tiles(rotation.rope, q.shape[3])):
        return why
    for x in map(rows_of, (k, k if v is None else v)):
        if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.uint8):
            return f"a cache of {x.dtype}, expected float32, bfloat16 or codes in uint8"
        if on_lanes(x) and (x.shape[-1] % tile_rows(x) or x.dtype == jnp.uint8):
            return f"rows of {x.dtype} are {x.shape[-1]} wide, expected a multiple of {LANES}"
        unit = LANES if on_lanes(x) else tile_rows(x)
        if x.shape[3] % unit:
            return f"{x.shape[3]} slots of {x.shape[-1]} channels, expected a multiple of {unit}"
        if (given or mass) and x.shape[1] * heads * slots < LANES:
            return f"{x.shape[1] * heads * slots} slots in all, expected at least {LANES}, one step's"
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries of {q.dtype}, expected float32 or bfloat16"
    return ""


def on_lanes(x: Array) -> bool:
    """Whether slots are on the lanes of a TPU's memory, which does not pad rows that do not fill lanes."""
    return x.shape[-1] % LANES != 0


def tile_rows(x: Array) -> int:
    """How many rows a tile has: copies must start at a multiple of it."""
    return SUBLANES * 4 // jnp.dtype(x.dtype).itemsize


def stacked_append(
    k: Float[Array, "L B K S W"],
    v: Float[Array, "L B K S X"] | None,
    new_k: Float[Array, "B K W"],
    new_v: Float[Array, "B K X"] | None,
    lengths: Int[Array, " B"] | Int[Array, "B K"],
    layer: int | Int[Array, ""] = 0,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "L B K S W"], Float[Array, "L B K S X"] | None]:
    """Append one more row to the caches in every KV head of a layer, at slot `lengths`.

    They are updated in place if they are donated, inside a scan over layers too. A KV head with a negative
    length gets nothing. v None: rows of k hold both. implementation: see `kvjax.ops.decode.append.append`.

    >>> k = jnp.zeros((2, 1, 1, 8, 4))
    >>> k, v = stacked_append(k, k, jnp.ones((1, 1, 4)), jnp.ones((1, 1, 4)), jnp.asarray([3]), layer=1)
    >>> k[1, 0, 0, :, 0].tolist()
    [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """
    layers, b, heads, slots, _ = k.shape
    lists = b * heads
    slot = jnp.broadcast_to(lengths.reshape(b, -1), (b, heads)).reshape(lists).astype(jnp.int32)
    block = jnp.asarray(layer, jnp.int32) * lists + jnp.arange(lists, dtype=jnp.int32)

    def pool(x: Array) -> Array:
        if on_lanes(x):
            return jnp.swapaxes(x, 3, 4).reshape(layers * lists, x.shape[4], slots)
        return x.reshape(layers * lists, 1, slots, x.shape[4])

    def back(x: Array, like: Array) -> Array:
        if on_lanes(like):
            return jnp.swapaxes(x.reshape(layers, b, heads, like.shape[4], slots), 3, 4)
        return x.reshape(like.shape)

    caches = [(x, new) for x, new in ((k, new_k), (v, new_v)) if x is not None and new is not None]
    rows = [new.reshape(lists, -1) if on_lanes(x) else new.reshape(lists, 1, -1) for x, new in caches]
    done = append([pool(x) for x, _ in caches], rows, block, slot, implementation=implementation)
    found = [back(x, like) for x, (like, _) in zip(done, caches, strict=True)]
    return found[0], None if v is None else found[1]


def _reference(
    q: Array, k: Array | CodedSlots, v: Array | CodedSlots | None, lengths: Array, q_pos: Array,
    layer: Array, *, scale: float, values: tuple[int, int], window: int | None, softcap: float | None,
    pos: Array | None, bias: Array | None, mass: bool, sizes: Factors, rotation: KeyRotation | None,
) -> tuple[Array, Array, Array | None]:  # fmt: skip
    (b, n, t, h), (first, width) = q.shape, values
    heads, slots, dtype = *rows_of(k).shape[2:4], wide(q)
    slot = jnp.arange(slots, dtype=jnp.int32)[None, None]
    live = slot < lengths[..., None]
    keys, rows = (
        jnp.where(live[..., None], _plain(x, size, layer, dtype), jnp.zeros((), dtype))
        for x, size in zip((k, k if v is None else v), sizes, strict=True)
    )
    keys, rows = keys[..., :h], rows[..., first : first + width]
    keys = keys if rotation is None else rotated_keys(rotation, keys, dtype)
    z = jnp.einsum("bkgth,bksh->bkgts", q.astype(dtype).reshape(b, heads, n // heads, t, h), keys) * scale
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    if bias is not None:
        z = z + jnp.where(live, bias[layer], 0.0).astype(dtype)[:, :, None, None]
    asked = q_pos[:, None, None, :, None]
    held = jnp.broadcast_to(slot if pos is None else pos[layer], live.shape)[:, :, None, None]
    seen = live[:, :, None, None] & (held >= 0) & (held <= asked)
    seen = seen if window is None else seen & (held > asked - window)
    p, lse = softmax(z, seen)
    out = jnp.einsum("bkgts,bksv->bkgtv", p, rows).astype(q.dtype)
    return out.reshape(b, n, t, width), lse.reshape(b, n, t), p.sum((2, 3)) if mass else None


def _plain(x: Array | CodedSlots, size: Array | None, layer: Array, dtype: Any) -> Array:
    """Decode one layer's rows [B, K, S, W], and multiply each row by its factor in `size`."""
    rows = rows_of(x)[layer].astype(dtype)
    if isinstance(x, CodedSlots):
        scale, zero = (y.astype(dtype)[..., None] for y in halves(x.scale_zero[layer]))
        rows = rows * scale + zero
    return rows if size is None else rows * size.astype(dtype)[..., None]


def _on_gpu(
    q: Array, k: Array | CodedSlots, v: Array | CodedSlots | None, lengths: Array, q_pos: Array,
    layer: Array, *, pos: Array | None, bias: Array | None, sizes: Factors,
    rotation: KeyRotation | None, **options: Any,
) -> tuple[Array, Array, Array | None]:  # fmt: skip
    layers, b, heads, slots, _ = rows_of(k).shape
    keys, rows = (None if x is None else rows_of(x).reshape(layers, b * heads * slots, -1) for x in (k, v))
    assert keys is not None
    origins = jnp.arange(b * heads, dtype=jnp.int32).reshape(b, heads, 1) * slots
    return gpu_stacked_decode(
        q, keys, rows, lengths, origins, q_pos, layer, sides_of(k, v, pos, bias, sizes, rotation), most=slots,
        rope=None if rotation is None else rotation.rope, **options,
    )  # fmt: skip


def tpu_stacked_decode(
    q: Array, k: Array | CodedSlots, v: Array | CodedSlots | None, lengths: Array, q_pos: Array,
    layer: Array, *, scale: float, values: tuple[int, int], window: int | None, softcap: float | None,
    pos: Array | None = None, bias: Array | None = None, sizes: Factors = (None, None),
    rotation: KeyRotation | None = None, mass: bool = False, block: int | None = None,
    cores: int | None = None, interpret: Any = False,
) -> tuple[Array, Array, Array | None]:  # fmt: skip
    """Run the kernel on the operands of `stacked_decode`. block: slots per step."""
    b, n, t, h = q.shape
    caches = [rows_of(x) for x in (k, v) if x is not None]
    heads, slots, width = caches[0].shape[2:]
    group, lists = n // heads, b * heads
    cores = cores or cores_for(lists)
    sides = sides_of(k, v, pos, bias, sizes, rotation)
    lanes = tuple(map(on_lanes, caches))
    piece, block = steps(
        slots, block or slots_per_step(*caches), whole=bool(sides), lanes=bool(sides) or mass or any(lanes)
    )
    queries = group * t
    pad = (0, -queries % SUBLANES)
    asked = jnp.pad(q.reshape(lists, queries, h), ((0, 0), pad, (0, width - h)))
    asked_pos = jnp.broadcast_to(q_pos[:, None, None], (b, heads, group, t)).reshape(lists, queries)
    asked_pos = jnp.pad(asked_pos.astype(jnp.int32), ((0, 0), pad), constant_values=-1)
    begins = jnp.zeros((lists,), jnp.int32)
    if window is not None and pos is None:
        begins = jnp.repeat(jnp.maximum(q_pos.min(-1) - window + 1, 0).astype(jnp.int32) // block, heads)
    room = -(-slots // block) * block if mass else 0
    which, steps_of = in_kernel(rotation, h)
    what = tpu.Sizes(
        block, piece, lists // cores, scale, window, softcap, v is None, tuple(sides), room, lanes,
        rotated=which,
    )  # fmt: skip
    origins = jnp.arange(lists, dtype=jnp.int32) * slots
    merged = [_in_place(x, lists) for x in caches]
    out, lse, *given = tpu.stacked_decode(
        asked, merged[0], None if v is None else merged[1], lengths.reshape(-1), begins, origins,
        jnp.broadcast_to(asked_pos[..., None], (*asked_pos.shape, LANES)), layer[None],
        tuple(_in_blocks(x, layer, block) for x in sides.values()), steps_of,
        sizes=what, cores=cores, interpret=interpret,
    )  # fmt: skip
    out = out[:, :queries, values[0] : sum(values)].reshape(b, n, t, values[1])
    lse = lse[:, :queries, 0].reshape(b, n, t)
    if not mass:
        return out, lse, None
    slot = jnp.arange(slots, dtype=jnp.int32)[None, None]
    visited = (slot >= begins.reshape(b, heads, 1) * block) & (slot < lengths[..., None])
    return out, lse, jnp.where(visited, given[0][:, 0, :slots].reshape(b, heads, slots), 0.0)


def _in_place(x: Array, lists: int) -> Array:
    """Lay a cache out for the kernel: all KV heads as one array of rows; with slots on lanes, by head."""
    if on_lanes(x):
        return jnp.swapaxes(x, 3, 4).reshape(x.shape[0], lists, x.shape[4], x.shape[3])
    return x.reshape(x.shape[0], lists * x.shape[3], x.shape[4])


def steps(slots: int, most: int, *, whole: bool, lanes: bool) -> tuple[int, int]:
    """(slots of a piece of a step, slots of a step): pieces fill the slots exactly, a step has whole pieces.

    whole: whether steps must fill the slots exactly, too, unless they would be shorter than half of `most`.
    lanes: whether a step must be a multiple of 128 slots.

    >>> steps(8192, 2048, whole=True, lanes=True), steps(8320, 2048, whole=True, lanes=True)
    ((128, 2048), (128, 1664))
    >>> steps(8336, 2048, whole=True, lanes=True)
    (16, 2048)
    """
    unit = LANES if lanes else 1
    most = max(unit, min(most, -(-slots // unit) * unit) // unit * unit)
    piece = math.gcd(slots, LANES)
    while piece > most:
        piece //= 2
    most = most // piece * piece
    exact = [x for x in range(piece, most + 1, piece) if slots % x == 0 and x % unit == 0]
    return piece, exact[-1] if whole and exact and 2 * exact[-1] > most else most


def _in_blocks(x: Array, layer: Array, block: int) -> Array:
    """Return x [L, B, K, S] if it has 32-bit words and whole blocks, else one layer cast and padded."""
    pad = -x.shape[3] % block
    dtype = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    if not pad and x.dtype == dtype:
        return x
    one = jax.lax.dynamic_index_in_dim(x, layer, 0).astype(dtype)
    return jnp.pad(one, ((0, 0), (0, 0), (0, 0), (0, pad)))


def slots_per_step(
    *caches: Array | jax.ShapeDtypeStruct, step_bytes: int = 2**20, generation: str | None = None
) -> int:
    """Return the tuned number of slots, or rows of `step_bytes`, so that copy latency does not matter."""
    channels = sum(x.shape[-1] for x in caches) // 2
    known = tuned("stacked_decode", caches[0].dtype.name, channels, generation)
    return known or step_bytes // sum(x.shape[-1] * jnp.dtype(x.dtype).itemsize for x in caches)
