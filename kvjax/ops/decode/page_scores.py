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
from kvjax.ops.base.triton import unable
from kvjax.ops.decode import partial_gpu as parts_gpu
from kvjax.pallas_kernels.page_scores import kernel_tpu as tpu

NEG_INF = float("-inf")
LANES, SUBLANES = tpu.LANES, 8
KINDS = (("centroid",), ("low", "high"))
# The most pages that a program on a GPU holds in registers.
MOST_PAGES = 16384


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

    implementation: "reference", "tpu", "gpu", "tpu interpret" or "gpu interpret"; None takes a kernel where
    it can run. Raises NotImplementedError if a forced one cannot, ValueError if operands do not fit.

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
    why = dict(tpu=refusal(q, summary), gpu=gpu_refusal(q, summary))
    chosen = form("page_scores", implementation, q, summary, **why)
    q, parts = jax.lax.stop_gradient((q, parts))
    if chosen == "reference":
        return _reference(q, tuple(x[layer] for x in parts), counts)
    call = tpu_page_scores if chosen.startswith("tpu") else gpu_page_scores
    return call(q, parts, counts, layer, interpret=chosen.endswith("interpret"))


def refusal(q: Array, summary: dict[str, Array]) -> str:
    """Why the TPU kernel cannot take these operands; empty if it can."""
    for name, x in {"queries": q, **summary}.items():
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} of {x.dtype}, expected float32 or bfloat16"
        if name != "queries" and x.shape[-1] % LANES:
            return f"summaries are {x.shape[-1]} wide, expected a multiple of {LANES}: keep them padded"
    return ""


def gpu_refusal(q: Array, summary: dict[str, Array]) -> str:
    """Why the GPU kernel cannot take these operands; empty if it can."""
    for name, x in summary.items():
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} of {x.dtype}, expected float32 or bfloat16"
    first = next(iter(summary.values()))
    return parts_gpu.gpu_refusal(q, first.shape[2], {"summaries": first.shape[-1]})


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
    """Run the kernel on the operands of `page_scores`, with `parts` its summary. block_pages: per step."""
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


def gpu_page_scores(
    q: Array, parts: tuple[Array, ...], counts: Array, layer: int | Array = 0, *,
    block_pages: int | None = None, warps: int = 4, interpret: bool = False,
) -> Array:  # fmt: skip
    """Run the GPU kernel on operands of `tpu_page_scores`. block_pages: of one program, a power of two."""
    from kvjax.pallas_kernels.page_scores import kernel_gpu as gpu

    b, n, t, h = q.shape
    layers, _, heads, pages, width = parts[0].shape
    lanes, queries = parts_gpu.power(width), n // heads * t
    # Exact products of float32 take more registers.
    exact = jnp.float32 in (q.dtype, *(x.dtype for x in parts))
    block = block_pages or (16 if exact or lanes > 256 else 64 if lanes <= LANES else 32)
    found = gpu.page_scores(
        q.reshape(b * heads, queries, h), tuple(x.reshape(layers, b * heads, pages, width) for x in parts),
        counts.reshape(-1).astype(jnp.int32), jnp.asarray(layer, jnp.int32)[None],
        sizes=gpu.Sizes(block, parts_gpu.power(queries), lanes, warps), interpret=interpret,
    )  # fmt: skip
    return found.reshape(b, heads, pages)


def best_pages(
    scores: Float[Array, "B K P"],
    counts: Int[Array, "B K"],
    *,
    most: int,
    implementation: str | None = None,
) -> Int[Array, "B K M"]:
    """Select the `counts` pages of the highest scores per KV head; they come first, in any order.

    most: M, an upper limit of `counts` (static). Of equal scores the older page is taken. All numbers are
    those of pages, each once.

    implementation: "reference", "gpu" or "gpu interpret"; None takes the kernel where it can run. TPUs run
    the reference, whatever their implementation is called. Raises NotImplementedError if a forced one cannot
    run, ValueError if `most` exceeds the pages.

    >>> scores = jnp.asarray([[[0.1, 0.9, 0.2, 0.0, 0.5]]])
    >>> sorted(best_pages(scores, jnp.asarray([[2]]), most=3)[0, 0, :2].tolist())
    [1, 4]
    """
    b, heads, total = scores.shape
    if most > total:
        raise ValueError(f"most must be at most the {total} pages, got {most}")
    if (implementation or "").startswith("tpu"):
        implementation = "reference"
    chosen = form("best_pages", implementation, scores, gpu=_choice_refusal(scores))
    scores = jax.lax.stop_gradient(scores)
    if chosen == "reference":
        return jax.lax.top_k(scores, most)[1]
    from kvjax.pallas_kernels.page_scores import kernel_gpu as gpu

    rows, wanted = scores.reshape(b * heads, total), counts.reshape(-1).astype(jnp.int32)
    return gpu.best_pages(rows, wanted, most=most, interpret=chosen != "gpu").reshape(b, heads, most)


def _choice_refusal(scores: Array) -> str:
    """Why the GPU kernel cannot choose by these scores; empty if it can."""
    if scores.dtype != jnp.float32:
        return f"scores of {scores.dtype}, expected float32"
    if scores.shape[-1] > MOST_PAGES:
        return f"{scores.shape[-1]} pages, expected at most {MOST_PAGES}"
    return unable()
