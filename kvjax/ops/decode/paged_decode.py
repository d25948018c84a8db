"""Attention of a few queries over pages, with a table of pages for every (sequence, KV head).

One layout serves everything in pages: a dense cache has a trivial table, a head with a small budget a short
one, a shared prefix the same entries in several tables, a read method a table of the pages it visits.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.ops.base.dispatch import form
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.rope import Rope, angles, rotate
from kvjax.ops.base.softmax import softmax
from kvjax.ops.decode.page_pool import SUBLANES, PagePool
from kvjax.ops.decode.paged_decode_gpu import gpu_paged_decode, gpu_refusal
from kvjax.ops.decode.rotation import angle_steps, rotated_channels
from kvjax.pallas_kernels.block_sizes import cores_for, tuned
from kvjax.pallas_kernels.paged_decode import kernel_tpu as tpu

LANES, PIECES = tpu.LANES, 64


def paged_decode(
    q: Float[Array, "B N T H"],
    pool: PagePool,
    table: Int[Array, "B K M"],
    lengths: Int[Array, "B K"],
    q_pos: Int[Array, "B T"],
    layer: int | Int[Array, ""] = 0,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    mass: bool = False,
    rope: Rope | None = None,
    phase: Int[Array, "B K S"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"], Float[Array, "B K S"] | None]:
    """Exact attention over the first `lengths` slots of each KV head's pages: (out, lse, mass).

    A slot is visible by its position if the pool has positions, else always. lse is -inf, and out 0, if a
    query sees nothing. mass: the probability of every slot, summed over the queries of its KV head; 0 after
    the length. Softmax in promote(float32, q).

    rope: rotates keys that are stored unrotated, by `phase`, else by the pool's positions, else by slot
    index; queries are given rotated. Ranks of the live slots as phases are StreamingLLM's positions within
    the cache (Xiao et al., 2024, arXiv:2309.17453, section 3.2), and codes of keys before rotation are
    KVQuant's (Hooper et al., 2024, arXiv:2401.18079, section 3.2).

    implementation: "reference", "tpu", "gpu", or these two with " interpret"; None takes the kernel if it can
    run. Raises NotImplementedError if a forced one cannot, ValueError if shapes do not fit.

    >>> from kvjax.ops.decode.page_pool import make_pool
    >>> k = jnp.ones((1, 2, 4, 8))
    >>> table, lengths = jnp.asarray([[[1, 0]]]), jnp.asarray([[6]])
    >>> out, lse, _ = paged_decode(
    ...     jnp.zeros((1, 1, 1, 8)), make_pool(k, k), table, lengths, jnp.zeros((1, 1), jnp.int32), scale=1.0
    ... )
    >>> out[0, 0, 0, 0].item(), round(float(jnp.exp(lse[0, 0, 0])))
    (1.0, 6)
    """
    b, n, _, h = q.shape
    if table.shape[0] != b or n % table.shape[1] or h > pool.width:
        raise ValueError(
            f"q {list(q.shape)}, table {list(table.shape)} and pages {list(pool.words.shape)} do not fit: "
            "expected as many sequences, KV heads that divide the query heads, and pages at least as wide"
        )
    if rope is not None and rope.by_length:
        raise ValueError(f"{rope.kind} rope's frequencies depend on a row's length: store rotated keys")
    if phase is not None and rope is None:
        raise ValueError("phase is given without rope, expected both: keys are rotated by it")
    if phase is not None and phase.shape != (*table.shape[:2], table.shape[2] * pool.page):
        raise ValueError(
            f"phase is {list(phase.shape)}, expected one for every slot of the table: {list(table.shape)} "
            f"pages of {pool.page} tokens"
        )
    why = dict(tpu=refusal(pool, q, rope), gpu=gpu_refusal(pool, q, table.shape[1], rope))
    chosen = form("paged_decode", implementation, q, pool, **why)
    options: dict[str, Any] = dict(scale=scale, window=window, softcap=softcap, mass=mass)
    options |= dict(rope=rope, phase=phase)
    at = jnp.asarray(layer, jnp.int32)
    if chosen == "reference":
        return _reference(q, pool, table, lengths, q_pos, at, **options)
    if chosen.startswith("gpu"):
        del options["rope"], options["phase"]
        return gpu_paged_decode(q, pool, table, lengths, q_pos, at, interpret=chosen != "gpu", **options)
    return tpu_paged_decode(q, pool, table, lengths, q_pos, at, interpret=chosen != "tpu", **options)


def refusal(pool: PagePool, q: Array, rope: Rope | None = None) -> str:
    """Why the TPU kernel cannot take these operands; empty if it can."""
    width = pool.words.shape[-1]
    if width % LANES:
        return f"pages are {width} wide, expected a multiple of {LANES}: pad them"
    if pool.rows % SUBLANES and pool.page % 16:
        return f"pages of {pool.page} tokens in {pool.payload}, expected a multiple of 16"
    if rope is not None and pool.page % LANES and LANES % pool.page:
        return f"pages of {pool.page} tokens with keys to rotate, expected a multiple or a divisor of {LANES}"
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries of {q.dtype}, expected float32 or bfloat16"
    return ""


def _reference(
    q: Array, pool: PagePool, table: Array, lengths: Array, q_pos: Array, layer: Array, *,
    scale: float, window: int | None, softcap: float | None, mass: bool,
    rope: Rope | None = None, phase: Array | None = None,
) -> tuple[Array, Array, Array | None]:  # fmt: skip
    b, n, t, h = q.shape
    heads, dtype = table.shape[1], wide(q)
    used = jnp.minimum(jnp.maximum(table, 0), pool.words.shape[1] - 1)
    slots = used.shape[2] * pool.page
    place = jnp.arange(slots)[None, None]
    live = place < lengths[..., None]

    def listed(x: Array) -> Array:
        return x[layer][used].astype(dtype).reshape(b, heads, slots, *x.shape[3:])

    def tokens(name: str) -> Array:
        return jnp.where(live, listed(pool.number(name)), 0.0)

    k, v = listed(pool.keys), listed(pool.values)
    if "channel_scale" in pool.names:
        scale_of, zero_of = (
            jnp.repeat(pool.number(name)[layer][used].astype(dtype), pool.page // pool.groups, axis=3)
            for name in ("channel_scale", "channel_zero")
        )
        k = k * scale_of.reshape(k.shape) + zero_of.reshape(k.shape)
    k = k * tokens("key_scale")[..., None] if "key_scale" in pool.names else k
    k = k + tokens("key_zero")[..., None] if "key_zero" in pool.names else k
    v = v * tokens("value_scale")[..., None] if "value_scale" in pool.names else v
    v = v + tokens("value_zero")[..., None] if "value_zero" in pool.names else v
    k, v = (jnp.where(live[..., None], x[..., :h], 0.0) for x in (k, v))
    if rope is not None:
        held = tokens("pos").astype(jnp.int32) if "pos" in pool.names else jnp.broadcast_to(place, live.shape)
        at = jnp.where(live, held if phase is None else phase, 0)
        k = rotate(k, *angles(rope, at, h, dtype=dtype), rope.start)
    grouped = q.astype(dtype).reshape(b, heads, n // heads, t, h)
    z = jnp.einsum("bkgth,bksh->bkgts", grouped, k) * scale
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    z = z + tokens("bias")[:, :, None, None] if "bias" in pool.names else z
    seen = live[:, :, None, None]
    if "pos" in pool.names:
        asked, pos = q_pos[:, None, None, :, None].astype(dtype), tokens("pos")[:, :, None, None]
        seen = seen & (pos >= 0.0) & (pos <= asked)
        seen = seen if window is None else seen & (pos > asked - window)
    p, lse = softmax(z, seen)
    out = jnp.einsum("bkgts,bksh->bkgth", p, v).astype(q.dtype)
    return out.reshape(q.shape), lse.reshape(b, n, t), p.sum((2, 3)) if mass else None


def tpu_paged_decode(
    q: Array, pool: PagePool, table: Array, lengths: Array, q_pos: Array, layer: Array, *,
    scale: float, window: int | None, softcap: float | None, mass: bool,
    rope: Rope | None = None, phase: Array | None = None,
    step: int | None = None, cores: int | None = None, interpret: Any = False,
) -> tuple[Array, Array, Array | None]:  # fmt: skip
    """Run the kernel on the operands of `paged_decode`. step: pages per step."""
    b, n, t, h = q.shape
    heads, page, width = table.shape[1], pool.page, pool.words.shape[-1]
    step = min(step or pages_per_step(pool), table.shape[2])
    if rope is not None:
        # The kernel rotates keys with their tokens on the lanes, so a step must fill all lanes.
        step += -step % max(LANES // page, 1)
    cores = cores or cores_for(b * heads)
    queries = n // heads * t
    pad = (0, -queries % SUBLANES)
    asked = jnp.pad(q.reshape(b * heads, queries, h), ((0, 0), pad, (0, width - h)))
    pos = jnp.broadcast_to(q_pos[:, None, None], (b, heads, n // heads, t)).reshape(b * heads, queries)
    pos = jnp.pad(pos, ((0, 0), pad), constant_values=-1)
    tables = jnp.pad(table.reshape(b * heads, 1, -1), ((0, 0), (0, 0), (0, -table.shape[2] % step)))
    rotating: tuple[Any, ...] = ()
    how = None if rope is None else rotated_channels(rope, h)
    if rope is not None and how is not None:
        rotating = (jnp.asarray(np.repeat(angle_steps(rope, h)[:, None], LANES, 1)),)
        if phase is not None:
            phases = phase.astype(jnp.int32).reshape(b * heads, 1, -1)
            rotating += (jnp.pad(phases, ((0, 0), (0, 0), (0, tables.shape[2] * page - phases.shape[2]))),)
    sizes = tpu.Sizes(
        step, page, pool.rows, pool.value_row, pool.payload, pool.names, pool.groups, queries,
        b * heads // cores, scale, window, softcap, mass,
        how,
    )  # fmt: skip
    out, lse, *rest = tpu.paged_decode(
        asked, pool.words, tables, lengths.reshape(-1),
        jnp.broadcast_to(pos[..., None], (*pos.shape, LANES)), layer[None], *rotating,
        sizes=sizes, cores=cores, interpret=interpret,
    )  # fmt: skip
    first = width - pool.width
    out = out[:, :queries, first : first + h].reshape(b, n, t, h)
    lse = lse[:, :queries, 0].reshape(b, n, t)
    if not mass:
        return out, lse, None
    found = rest[0].reshape(b, heads, -1)[..., : table.shape[2] * page]
    return out, lse, jnp.where(jnp.arange(found.shape[-1])[None, None] < lengths[..., None], found, 0.0)


def pages_per_step(pool: PagePool, step_bytes: int = 2**20) -> int:
    """Return the tuned number of pages, or pages of `step_bytes`, so that a copy's latency does not matter.

    Their tokens fill whole lanes, because masses are written that way.
    """
    slots = tuned("paged_decode", pool.payload, pool.words.shape[-1])
    pages = slots // pool.page if slots else step_bytes // (4 * math.prod(pool.words.shape[2:]))
    if pool.names:
        # The numbers of every page are read as a separate piece, and registers hold only so many pieces.
        pages = min(pages, PIECES)
    unit = LANES // math.gcd(pool.page, LANES)
    return max(unit, pages // unit * unit)
