"""Page scores: which pages a query should read, by summaries of their keys, and the best ones per KV head.

Read methods keep every page and visit few. The summary of a page is the channel-wise minimum and maximum of
its keys (Quest, Tang et al., 2024, arXiv:2406.10774, section 3.3), or one vector such as their mean.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.ops.base.dispatch import form
from kvjax.ops.base.dtypes import wide
from kvjax.pallas_kernels.page_scores import kernel_tpu as tpu

NEG_INF = float("-inf")
LANES, SUBLANES = tpu.LANES, 8
KINDS = (("centroid",), ("low", "high"))


def page_scores(
    q: Float[Array, "B N T H"],
    summary: dict[str, Float[Array, "L B K P W"]],
    counts: Int[Array, "B K"],
    layer: int | Int[Array, ""] = 0,
    *,
    implementation: str | None = None,
) -> Float[Array, "B K P"]:
    """Scores of a layer's pages: the largest over the queries of a KV head; -inf from page `counts` on.

    summary {"low", "high"}: Quest's bound sum_h max(q_h low_h, q_h high_h) = relu(q) high + min(q, 0) low;
    {"centroid"}: q centroid. W is the head's width or, zero-padded, a multiple of 128. Logits are
    not scaled. Sums in promote(float32, q); gradients are zero.

    implementation: "reference", "tpu" or "tpu interpret"; None takes the kernel if it  can run. Raises
    NotImplementedError if a forced one cannot, ValueError if operands do not fit.

    >>> low, high = jnp.asarray([[[[[-1.0], [2.0]]]]]), jnp.asarray([[[[[1.0], [3.0]]]]])
    >>> q = jnp.asarray([[[[2.0]], [[-1.0]]]])  # two heads of one group
    >>> page_scores(q, {"low": low, "high": high}, jnp.asarray([[2]])).tolist()
    [[[2.0, 6.0]]]
    """
    names = next((kind for kind in KINDS if set(kind) == set(summary)), None)
    if names is None:
        raise ValueError(
            f"a summary has 'low' and 'high', or 'centroid', got {', '.join(summary) or 'nothing'}"
        )
    parts = tuple(summary[name] for name in names)
    b, n, _, h = q.shape
    if parts[0].shape[1] != b or n % parts[0].shape[2] or h > parts[0].shape[-1]:
        raise ValueError(
            f"q {list(q.shape)} and summaries {list(parts[0].shape)} do not fit: expected as many sequences, "
            "KV heads that divide the query heads, and summaries at least as wide"
        )
    chosen = form("page_scores", implementation, q, summary, tpu=refusal(q, summary))
    q, parts = jax.lax.stop_gradient((q, parts))
    if chosen == "reference":
        return _reference(q, tuple(x[layer] for x in parts), counts)
    return tpu_page_scores(q, parts, counts, layer, interpret=chosen != "tpu")


def refusal(q: Array, summary: dict[str, Array]) -> str:
    """Why the TPU kernel cannot take these operands; empty if it can."""
    for name, x in {"queries": q, **summary}.items():
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} of {x.dtype}, expected float32 or bfloat16"
        if name != "queries" and x.shape[-1] % LANES:
            return f"summaries are {x.shape[-1]} wide, expected a multiple of {LANES}: keep them padded"
    return ""


def _reference(q: Array, parts: tuple[Array, ...], counts: Array) -> Array:
    b, n, t, h = q.shape
    heads, pages = parts[0].shape[1:3]
    dtype = wide(q)
    rows = q.astype(dtype).reshape(b, heads, n // heads * t, h)
    signed = (rows,) if len(parts) == 1 else (jnp.minimum(rows, 0), jnp.maximum(rows, 0))
    scores = sum(
        jnp.einsum("bkrh,bkph->bkrp", r, x[..., :h].astype(dtype)) for r, x in zip(signed, parts, strict=True)
    )
    live = jnp.arange(pages)[None, None] < counts[..., None]
    return jnp.where(live, jnp.asarray(scores).max(2), NEG_INF)


def tpu_page_scores(
    q: Array, parts: tuple[Array, ...], counts: Array, layer: int | Array = 0, *, block_pages: int = 2048,
    interpret: Any = False,
) -> Array:  # fmt: skip
    """The kernel, on the operands of `page_scores`, with `parts` its summary. block_pages: pages per step."""
    b, n, t, h = q.shape
    layers, _, heads, pages, width = parts[0].shape
    rows = jnp.pad(q.reshape(b * heads, n // heads * t, h), ((0, 0), (0, 0), (0, width - h)))
    # Padding repeats the last query, which does not change a maximum over queries.
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % SUBLANES), (0, 0)), mode="edge")
    found = tpu.page_scores(
        rows, tuple(x.reshape(layers, b * heads, pages, width) for x in parts),
        counts.reshape(-1).astype(jnp.int32), jnp.asarray(layer, jnp.int32)[None],
        pages=min(block_pages, -(-pages // LANES) * LANES), interpret=interpret,
    )  # fmt: skip
    return found.reshape(b, heads, pages)


def best_pages(
    scores: Float[Array, "B K P"],
    counts: Int[Array, "B K"],
    wanted: Int[Array, "B K"],
    *,
    most: int,
    first: int = 0,
    last: int = 0,
) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:
    """The `wanted` best of a KV head's `counts` pages, ascending and padded with -1, and how many.

    most: M, an upper limit (static). first, last: how many pages from either end are always taken; they count
    among the wanted, and are taken even if fewer are wanted. Of equal scores the older page is taken. Raises
    ValueError if `most` is less than what is always taken.

    >>> pages, count = best_pages(
    ...     jnp.asarray([[[0.1, 0.9, 0.2, 0.0, 0.5]]]), jnp.asarray([[4]]), jnp.asarray([[2]]), most=3, last=1
    ... )
    >>> pages.tolist(), count.tolist()
    ([[[1, 3, -1]]], [[2]])
    """
    total = scores.shape[-1]
    if not first + last <= most <= total:
        raise ValueError(f"most must be from first + last = {first + last} to the {total} pages, got {most}")
    page, held = jnp.arange(total, dtype=jnp.int32)[None, None], counts[..., None]
    always = (page < first) | (page >= held - last)
    ranked = jnp.where(page < held, jnp.where(always, jnp.inf, scores), NEG_INF)
    _, index = jax.lax.top_k(ranked, most)
    count = jnp.minimum(jnp.minimum(jnp.maximum(wanted, first + last), counts), most).astype(jnp.int32)
    taken = jnp.arange(most, dtype=jnp.int32)[None, None] < count[..., None]
    pages = jnp.sort(jnp.where(taken, index, total), axis=-1)
    return jnp.where(pages == total, -1, pages).astype(jnp.int32), count
