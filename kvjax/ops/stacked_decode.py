"""Attention of a few queries over the dense cache of all layers, taken whole: [L, B, K, S, H].

A layer scan carries the cache; slicing a layer out of it copies that layer, once per layer and token. So the
operation takes the whole and the number of the layer.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.ops.append import append
from kvjax.ops.dtypes import wide
from kvjax.pallas_kernels.blocks import tuned
from kvjax.pallas_kernels.stacked_decode import kernel_tpu as tpu
from kvjax.pallas_kernels.streaming import LANES, NEG_INF, SUBLANES

# Of a sequence's positions, or biases: two of them in two buffers are 8 MiB of VMEM.
SIDE_NUMBERS = 2**19


def stacked_decode(
    q: Float[Array, "B N T H"],
    k: Float[Array, "L B K S W"],
    v: Float[Array, "L B K S X"] | None,
    lengths: Int[Array, " B"] | Int[Array, "B K"],
    q_pos: Int[Array, "B T"],
    layer: int | Int[Array, ""] = 0,
    *,
    scale: float,
    pos: Int[Array, "L B K S"] | None = None,
    bias: Float[Array, "L B K S"] | None = None,
    values: int | None = None,
    first: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:
    """Exact attention over the first `lengths` slots of layer `layer`: (out, lse).

    A query at q_pos sees positions q_pos - window + 1 .. q_pos; slot s holds position s unless `pos` says
    otherwise, where -1 is an empty slot. bias is added to the logits. lse is -inf, and out 0, where nothing
    is seen. Softmax in promote(float32, q).

    Rows may be wider than the H channels of keys and the `values` (H unless given) of values, which come
    first; what follows must be finite. v None: rows of k hold both, the values from channel `first` on, which
    is H unless given, so that keys and values of 64 fill a row of 128; 0 is for latents. Rows behind the
    length are never read.

    implementation: "reference", "tpu" or "tpu interpret"; None takes the kernel where it can run. Raises
    NotImplementedError where a forced one cannot, ValueError where shapes do not fit.

    >>> k = jnp.ones((3, 1, 2, 16, 8))
    >>> q, length, pos = jnp.zeros((1, 4, 1, 8)), jnp.asarray([6]), jnp.asarray([[5]])
    >>> out, lse = stacked_decode(q, k, k, length, pos, layer=2, scale=1.0)
    >>> out[0, 0, 0, 0].item(), round(float(jnp.exp(lse[0, 0, 0])))
    (1.0, 6)
    """
    b, n, _, h = q.shape
    width = h if values is None else values
    start = (h if v is None else 0) if first is None else first
    room = (k if v is None else v).shape[-1] - start
    same = v is None or v.shape[:-1] == k.shape[:-1]
    if k.shape[1] != b or n % k.shape[2] or h > k.shape[-1] or width > room or not same:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {v if v is None else list(v.shape)}, {width} values do "
            "not fit: expected as many sequences, KV heads that divide the query heads, and rows as wide"
        )
    at = jnp.asarray(layer, jnp.int32)
    lists = jnp.broadcast_to(lengths.reshape(b, -1), k.shape[1:3]).astype(jnp.int32)
    options: dict[str, Any] = dict(scale=scale, values=(start, width), window=window, softcap=softcap)
    options |= dict(pos=pos, bias=bias)
    why = refusal(q, k, v, pos, bias)
    chosen = implementation or ("reference" if jax.default_backend() != "tpu" or why else "tpu")
    if chosen == "reference":
        return _reference(q, k, v, lists, q_pos, at, **options)
    if chosen not in ("tpu", "tpu interpret") or why:
        raise NotImplementedError(
            f"stacked_decode cannot run as {chosen!r}: {why or 'there is no such form'}"
        )
    return tpu_stacked_decode(q, k, v, lists, q_pos, at, interpret=chosen != "tpu", **options)


def refusal(q: Array, k: Array, v: Array | None, *sides: Array | None) -> str:
    """Why the TPU kernel cannot take these operands; empty where it can."""
    for x in (x for x in sides if x is not None):
        if x.shape[3] % LANES or x.shape[2] * x.shape[3] > SIDE_NUMBERS:
            return (
                f"pos or bias of {x.shape[2]} heads x {x.shape[3]} slots, expected a multiple of {LANES} "
                f"slots and at most {SIDE_NUMBERS} numbers"
            )
    for x in (k, k if v is None else v):
        if x.shape[-1] % LANES:
            return f"rows are {x.shape[-1]} wide, expected a multiple of {LANES}: pad, or keep v behind k"
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"a cache of {x.dtype}, expected float32 or bfloat16"
        if x.shape[3] % tile_rows(x):
            return f"{x.shape[3]} slots, expected a multiple of {tile_rows(x)}"
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries of {q.dtype}, expected float32 or bfloat16"
    return ""


def tile_rows(x: Array) -> int:
    """Rows of a tile: what a copy must start at a multiple of."""
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
    """The caches with one row more in every list of a layer, at slot `lengths`.

    They stay in their own memory where they are donated, inside a scan over layers too. A list whose length
    is negative gets nothing. v None: rows of k hold both. implementation: see `kvjax.ops.append.append`.

    >>> k = jnp.zeros((2, 1, 1, 8, 4))
    >>> k, v = stacked_append(k, k, jnp.ones((1, 1, 4)), jnp.ones((1, 1, 4)), jnp.asarray([3]), layer=1)
    >>> k[1, 0, 0, :, 0].tolist()
    [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """
    layers, b, heads, slots, _ = k.shape
    lists = b * heads
    slot = jnp.broadcast_to(lengths.reshape(b, -1), (b, heads)).reshape(lists).astype(jnp.int32)
    block = jnp.asarray(layer, jnp.int32) * lists + jnp.arange(lists, dtype=jnp.int32)
    flat = [x.reshape(layers * lists, 1, slots, x.shape[-1]) for x in (k, v) if x is not None]
    rows = [x.reshape(lists, 1, -1) for x in (new_k, new_v) if x is not None]
    done = append(flat, rows, block, slot, implementation=implementation)
    return done[0].reshape(k.shape), None if v is None else done[1].reshape(v.shape)


def _reference(
    q: Array, k: Array, v: Array | None, lengths: Array, q_pos: Array, layer: Array, *,
    scale: float, values: tuple[int, int], window: int | None, softcap: float | None,
    pos: Array | None, bias: Array | None,
) -> tuple[Array, Array]:  # fmt: skip
    (b, n, t, h), (first, width) = q.shape, values
    heads, slots, dtype = k.shape[2], k.shape[3], wide(q)
    slot = jnp.arange(slots, dtype=jnp.int32)[None, None]
    live = slot < lengths[..., None]
    keys = k[layer][..., :h]
    rows = (k if v is None else v)[layer][..., first : first + width]
    keys, rows = (jnp.where(live[..., None], x.astype(dtype), jnp.zeros((), dtype)) for x in (keys, rows))
    z = jnp.einsum("bkgth,bksh->bkgts", q.astype(dtype).reshape(b, heads, n // heads, t, h), keys) * scale
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    if bias is not None:
        z = z + jnp.where(live, bias[layer], 0.0).astype(dtype)[:, :, None, None]
    asked = q_pos[:, None, None, :, None]
    held = jnp.broadcast_to(slot if pos is None else pos[layer], live.shape)[:, :, None, None]
    seen = live[:, :, None, None] & (held >= 0) & (held <= asked)
    seen = seen if window is None else seen & (held > asked - window)
    z = jnp.where(seen, z, NEG_INF)
    top = z.max(-1, keepdims=True)
    base = jnp.where(top == NEG_INF, 0.0, top)
    p = jnp.exp(z - base)
    total = p.sum(-1, keepdims=True)
    safe = jnp.where(total == 0.0, 1.0, total)
    lse = jnp.where(total == 0.0, NEG_INF, base + jnp.log(safe))
    out = jnp.einsum("bkgts,bksv->bkgtv", p / safe, rows).astype(q.dtype)
    return out.reshape(b, n, t, width), lse.reshape(b, n, t)


def tpu_stacked_decode(
    q: Array, k: Array, v: Array | None, lengths: Array, q_pos: Array, layer: Array, *,
    scale: float, values: tuple[int, int], window: int | None, softcap: float | None,
    pos: Array | None = None, bias: Array | None = None, block: int | None = None,
    cores: int = 1, interpret: Any = False,
) -> tuple[Array, Array]:  # fmt: skip
    """The kernel on the operands of `stacked_decode`. block: slots per step."""
    b, n, t, h = q.shape
    heads, slots, width = k.shape[2:]
    group, lists = n // heads, b * heads
    sides = {"pos": pos, "bias": bias}
    sides = {name: x for name, x in sides.items() if x is not None}
    piece = math.gcd(slots, LANES, block or LANES)
    most = max(piece, min(block or slots_per_step(k, v), slots) // piece * piece)
    block = max(x for x in range(piece, 2 * most, piece) if slots % x == 0) if sides else most
    queries = group * t
    pad = (0, -queries % SUBLANES)
    asked = jnp.pad(q.reshape(lists, queries, h), ((0, 0), pad, (0, width - h)))
    asked_pos = jnp.broadcast_to(q_pos[:, None, None], (b, heads, group, t)).reshape(lists, queries)
    asked_pos = jnp.pad(asked_pos.astype(jnp.int32), ((0, 0), pad), constant_values=-1)
    begins = jnp.zeros((lists,), jnp.int32)
    if window is not None and pos is None:
        begins = jnp.repeat(jnp.maximum(q_pos.min(-1) - window + 1, 0).astype(jnp.int32) // block, heads)
    sizes = tpu.Sizes(block, piece, lists // cores, scale, window, softcap, v is None, tuple(sides))
    merged = [None if x is None else x.reshape(x.shape[0], lists, slots, -1) for x in (k, v)]
    out, lse = tpu.stacked_decode(
        asked, merged[0], merged[1], lengths.reshape(-1), begins,  # pyright: ignore[reportArgumentType]
        jnp.broadcast_to(asked_pos[..., None], (*asked_pos.shape, LANES)), layer[None],
        tuple(x.astype(jnp.int32 if name == "pos" else jnp.float32) for name, x in sides.items()),
        sizes=sizes, cores=cores, interpret=interpret,
    )  # fmt: skip
    out = out[:, :queries, values[0] : sum(values)].reshape(b, n, t, values[1])
    return out, lse[:, :queries, 0].reshape(b, n, t)


def slots_per_step(
    k: Array | jax.ShapeDtypeStruct,
    v: Array | jax.ShapeDtypeStruct | None,
    step_bytes: int = 2**20,
    generation: str | None = None,
) -> int:
    """Slots that were tuned, or whose rows make about `step_bytes`: below that, a copy's latency shows."""
    caches = (k,) if v is None else (k, v)
    channels = sum(x.shape[-1] for x in caches) // 2
    return tuned("stacked_decode", k.dtype.name, channels, generation) or step_bytes // sum(
        x.shape[-1] * jnp.dtype(x.dtype).itemsize for x in caches
    )
