"""Page scores of full KV heads: Quest's bounds, and centroids; on GPUs the choice of pages by them, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from kvjax.aot.case import Case
from kvjax.aot.hardware import Device
from kvjax.ops.decode.page_scores import tpu_page_scores

HEADS, GROUP, BLOCK = 8, 8, 2048


def page_scores(device: Device, *, parts: int, pages: int = 8192, batch: int = 4, width: int = 128) -> Case:
    """K = 8, G = 8, bfloat16; `parts` summaries per page."""
    operands = (
        jax.ShapeDtypeStruct((batch, HEADS * GROUP, 1, width), jnp.bfloat16),
        tuple(jax.ShapeDtypeStruct((1, batch, HEADS, pages, width), jnp.bfloat16) for _ in range(parts)),
        jax.ShapeDtypeStruct((batch, HEADS), jnp.int32),
    )
    lists = batch * HEADS
    cache = parts * lists * pages * width * 2
    found = 4 * lists * pages
    moved = cache + found + 2 * lists * GROUP * width
    return Case(
        partial(tpu_page_scores, block_pages=BLOCK), operands, moved,
        2 * parts * lists * GROUP * pages * width, cache, "page_scores",
        trips={"1": lists * pages // BLOCK}, relaid=found,
    )  # fmt: skip


def best_pages(device: Device, *, pages: int = 8192, batch: int = 4) -> Case:
    """Choose a quarter of the pages of K = 8 KV heads."""
    scores = jax.ShapeDtypeStruct((batch, HEADS, pages), jnp.float32)
    counts = jax.ShapeDtypeStruct((batch, HEADS), jnp.int32)
    moved = 5 * scores.size
    return Case(lambda *x: x, (scores, counts), moved, 0, 0, "best_pages", trips={})


CASES: dict[str, Callable[[Device], Case]] = {
    **{
        f"page_scores-bounds-{pages}": partial(page_scores, parts=2, pages=pages, batch=2**15 // pages)
        for pages in (2048, 4096, 8192)
    },
    "page_scores-centroids-8192": partial(page_scores, parts=1),
    "page_scores-bounds-h256": partial(page_scores, parts=2, width=256),
}
# TPUs choose by XLA's sort.
GPU_CASES: dict[str, Callable[[Device], Case]] = {
    f"best_pages-float32-{pages}": partial(best_pages, pages=pages, batch=2**15 // pages)
    for pages in (2048, 8192, 16384)
}
