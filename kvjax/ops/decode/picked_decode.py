"""Attention of a few queries over pages picked from the stacked cache of all layers, [L, B, K, S, H].

The pages that a method picks, such as Quest (Tang et al., 2024, arXiv:2406.10774), are read in place: a table
of pages for every sequence and KV head replaces copies of them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.ops.attention.union import Keys, attend
from kvjax.ops.base.dispatch import alone, form
from kvjax.ops.decode.stacked_decode import KEPT_NUMBERS, on_lanes, slots_per_step, tile_rows
from kvjax.ops.decode.stacked_decode_gpu import gpu_refusal, gpu_stacked_decode
from kvjax.pallas_kernels.block_sizes import cores_for
from kvjax.pallas_kernels.scalars import TABLE_BYTES
from kvjax.pallas_kernels.stacked_decode import kernel_tpu as tpu
from kvjax.pallas_kernels.streaming import LANES, SUBLANES


def picked_decode(
    q: Float[Array, "B N T H"],
    k: Float[Array, "L B K S H"],
    v: Float[Array, "L B K S V"],
    pages: Int[Array, "B K M"],
    counts: Int[Array, "B K"],
    pos: Int[Array, "B K P"],
    q_pos: Int[Array, "B T"],
    layer: int | Int[Array, ""] = 0,
    *,
    page: int,
    scale: float,
    bias: Float[Array, "B X P"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:
    """Exact attention over the first `counts` of the `pages` of layer `layer`: (out, lse).

    Page p of a KV head is its slots p * page .. p * page + page - 1. pos: the positions of the picked pages'
    slots, -1 for empty ones, which must hold finite values; a query at q_pos sees positions q_pos - window +
    1 .. q_pos. bias is added to the logits of the picked slots, in every KV head (X = K) or every query head
    (X = N); a slot with -inf is invisible. lse is -inf, and out 0, if nothing is visible. Softmax in
    promote(float32, q).

    implementation: "reference", "tpu", "gpu", or these two with " interpret"; None takes the kernel if it can
    run. Raises NotImplementedError if a forced one cannot, ValueError if shapes do not fit.

    >>> k = jnp.ones((2, 1, 1, 8, 4)).at[1, 0, 0, 4:].set(3.0)
    >>> q, at = jnp.zeros((1, 1, 1, 4)), jnp.asarray([[7]])
    >>> pages, counts, pos = jnp.asarray([[[1, 0]]]), jnp.asarray([[1]]), jnp.arange(8)[None, None]
    >>> out, lse = picked_decode(q, k, k, pages, counts, pos, at, 1, page=4, scale=1.0)
    >>> out[0, 0, 0, 0].item(), round(float(jnp.exp(lse[0, 0, 0])))
    (3.0, 4)
    """
    most = pages.shape[2] * page
    fit = q.shape[1] % k.shape[2] == 0 and k.shape[:4] == v.shape[:4] and q.shape[3] == k.shape[4]
    lists = (pages.shape[:2], counts.shape, pos.shape[:2]) == (k.shape[1:3],) * 3
    if not fit or not lists or k.shape[3] % page or pos.shape[2] != most:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, pages {list(pages.shape)} of {page} "
            f"slots, counts {list(counts.shape)} and pos {list(pos.shape)} do not fit: expected KV heads "
            f"that divide query heads, whole pages, and {most} positions of every list"
        )
    if bias is not None and bias.shape not in {(q.shape[0], n, most) for n in (q.shape[1], k.shape[2])}:
        raise ValueError(
            f"bias is {list(bias.shape)}, expected one for each of {most} slots and every KV or query head: "
            f"{[q.shape[0], k.shape[2], most]} or {[q.shape[0], q.shape[1], most]}"
        )
    at = jnp.asarray(layer, jnp.int32)
    options: dict[str, Any] = dict(page=page, scale=scale, window=window, softcap=softcap, bias=bias)
    heads = bias is not None and bias.shape[1] != k.shape[2]
    why = refusals(q, k, v, pages.shape[2], page, bias is not None, heads)
    chosen = form("picked_decode", implementation, q, k, v, **why)
    if chosen == "reference":
        return _reference(q, k, v, pages, counts, pos, q_pos, at, **options)
    if chosen.startswith("gpu"):
        return _on_gpu(q, k, v, pages, counts, pos, q_pos, at, interpret=chosen != "gpu", **options)
    return tpu_picked_decode(q, k, v, pages, counts, pos, q_pos, at, interpret=chosen != "tpu", **options)


def picked(
    x: Shaped[Array, "L B K S *r"], pages: Int[Array, "B K M"], layer: int | Array, size: int
) -> Shaped[Array, "B K P *r"]:
    """Pages of `size` rows, gathered from all layers at once: slicing the layer first would copy it.

    If arrays are split over devices the layer is sliced nevertheless: each device then gathers from its own
    KV heads.
    """
    b, k, most = pages.shape
    every = x.shape[3] // size
    if not alone(x, pages):
        own = x[layer].reshape(b, k, every, size, *x.shape[4:])
        found = jnp.take_along_axis(own, pages.reshape(*pages.shape, *(1,) * (own.ndim - 3)), axis=2)
        return found.reshape(b, k, most * size, *x.shape[4:])
    lists = jnp.arange(b * k, dtype=jnp.int32).reshape(b, k, 1)
    number = (layer * b * k + lists) * every + pages
    return x.reshape(-1, size, *x.shape[4:])[number].reshape(b, k, most * size, *x.shape[4:])


def refusals(
    q: Array, k: Array, v: Array, most: int, page: int, biased: bool = False, by_head: bool = False
) -> dict[str, str]:
    """Why the kernel of each platform cannot take these operands and `most` pages per KV head.

    biased: whether slots have biases; by_head: whether every query head has its own.
    """
    coded = "codes have no kernel" if jnp.uint8 in (k.dtype, v.dtype) else ""
    own = "biases of every query head have no kernel" if by_head else ""
    return dict(
        tpu=own or refusal(q, k, v, most, page, biased), gpu=coded or gpu_refusal(q, k.shape[2], k, v)
    )


def refusal(q: Array, k: Array, v: Array, most: int, page: int, biased: bool = False) -> str:
    """Why the TPU kernel cannot take these operands and `most` pages per KV head; empty if it can."""
    for x in (k, v):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"a cache of {x.dtype}, expected float32 or bfloat16"
        if on_lanes(x):
            return f"rows are {x.shape[-1]} wide, expected a multiple of {LANES}"
        if page % tile_rows(x) or (LANES % page and page % LANES):
            return (
                f"pages of {page} slots of {x.dtype}, expected a multiple of {tile_rows(x)} that fits {LANES}"
            )
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries of {q.dtype}, expected float32 or bfloat16"
    _, b, heads, *_ = k.shape
    if 4 * b * heads * most > TABLE_BYTES or 2 * (1 + biased) * heads * most * page > KEPT_NUMBERS:
        return f"{most} pages of {page} slots for {b} x {heads} lists: their table or numbers are too large"
    return ""


def _reference(
    q: Array, k: Array, v: Array, pages: Array, counts: Array, pos: Array, q_pos: Array, layer: Array, *,
    page: int, scale: float, window: int | None, softcap: float | None, bias: Array | None,
) -> tuple[Array, Array]:  # fmt: skip
    used = jnp.arange(pages.shape[2], dtype=jnp.int32)[None, None] < counts[..., None]
    there = jnp.where(used, pages, 0)
    live = jnp.repeat(used, page, axis=2)
    keys, values = (
        jnp.where(live[..., None], picked(x, there, layer, page), jnp.zeros((), x.dtype)) for x in (k, v)
    )
    seen = Keys(keys, values, jnp.where(live, pos, -1), bias)
    out, lse, _ = attend(q, seen, q_pos, scale=scale, window=window, softcap=softcap)
    return out, lse


def _on_gpu(
    q: Array, k: Array, v: Array, pages: Array, counts: Array, pos: Array, q_pos: Array, layer: Array, *,
    page: int, bias: Array | None, **options: Any,
) -> tuple[Array, Array]:  # fmt: skip
    layers, b, heads, slots, _ = k.shape
    first = jnp.arange(b * heads, dtype=jnp.int32).reshape(b, heads, 1) * slots
    out, lse, _ = gpu_stacked_decode(
        q, k.reshape(layers, -1, k.shape[4]), v.reshape(layers, -1, v.shape[4]), counts * page,
        first + pages * page, q_pos, layer, _sides(pos, bias), most=pages.shape[2] * page,
        values=(0, v.shape[4]), page=page, **options,
    )  # fmt: skip
    return out, lse


def _sides(pos: Array, bias: Array | None) -> dict[str, Array]:
    """Per-slot numbers of the picked slots, [1, B, K or N, P], by the names of the kernel."""
    return {"pos": pos[None]} | ({} if bias is None else {"bias": bias[None]})


def tpu_picked_decode(
    q: Array, k: Array, v: Array, pages: Array, counts: Array, pos: Array, q_pos: Array, layer: Array, *,
    page: int, scale: float, window: int | None, softcap: float | None, bias: Array | None = None,
    block: int | None = None, cores: int | None = None, interpret: Any = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Run the kernel on the operands of `picked_decode`. block: slots per step."""
    (b, n, t, h), (layers, _, heads, slots, _) = q.shape, k.shape
    lists, queries, unit = b * heads, n // heads * t, max(page, LANES)
    cores = cores or cores_for(lists)
    most = -(-pages.shape[2] * page // unit) * unit
    block = max(unit, min(block or slots_per_step(k, v), most) // unit * unit)
    most = -(-most // block) * block
    first = jnp.arange(lists, dtype=jnp.int32).reshape(b, heads, 1) * slots
    table = jnp.pad(first + pages * page, ((0, 0), (0, 0), (0, most // page - pages.shape[2])))
    wider = (0, 0), (0, 0), (0, most - pos.shape[2])
    sides = _sides(jnp.pad(pos, wider, constant_values=-1), None if bias is None else jnp.pad(bias, wider))
    pad = (0, -queries % SUBLANES)
    asked = jnp.pad(q.reshape(lists, queries, h), ((0, 0), pad, (0, 0)))
    at = jnp.broadcast_to(q_pos[:, None, None], (b, heads, n // heads, t)).reshape(lists, queries)
    at = jnp.pad(at, ((0, 0), pad), constant_values=-1)
    sizes = tpu.Sizes(
        block, page, lists // cores, scale, window, softcap, sides=tuple(sides), pages=most // page
    )
    out, lse = tpu.stacked_decode(
        asked, k.reshape(layers, lists * slots, h), v.reshape(layers, lists * slots, v.shape[4]),
        (counts * page).reshape(-1).astype(jnp.int32), jnp.zeros((lists,), jnp.int32), table.reshape(-1),
        jnp.broadcast_to(at[..., None], (*at.shape, LANES)), layer[None], tuple(sides.values()),
        sizes=sizes, cores=cores, interpret=interpret,
    )  # fmt: skip
    return out[:, :queries].reshape(b, n, t, -1), lse[:, :queries, 0].reshape(b, n, t)
