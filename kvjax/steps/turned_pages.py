"""Pages whose keys lie unrotated, attended to where they lie: only kernels turn keys there."""

from __future__ import annotations

from jaxtyping import Array

from kvjax.cache import Codes, Paged, Pages
from kvjax.ops.base.dispatch import form
from kvjax.ops.decode import ragged_decode as ragged
from kvjax.ops.decode.turning import Turn


def form_over_turned(q: Array, pages: Paged, pool: Pages, turn: Turn, implementation: str | None) -> str:
    """In which form pages are attended to; NotImplementedError where a kernel is forced and cannot run."""
    if isinstance(pool.k, Codes) or isinstance(pool.v, Codes):
        why = "pages of codes have no kernel where keys are yet to turn"
        return form("attention over pages", implementation, q, pages, pool, tpu=why, gpu=why)
    lists, page = pages.table.shape, pool.page_tokens
    given = 1 + (pool.bias is not None), lists[1], lists[2] * page
    each = ragged.refusals(q, pool.k, pool.v, page, given, turn.rope)
    return form("attention over pages", implementation, q, pages, pool, **each)


def attend_turned_pages(
    q: Array, pages: Paged, pool: Pages, turn: Turn, *, scale: float, softcap: float | None,
    implementation: str | None,
) -> tuple[Array, Array]:  # fmt: skip
    """Attention of the query of a step over one layer's pages, as a list each: (out, lse)."""
    assert not isinstance(pool.k, Codes) and not isinstance(pool.v, Codes)
    lists, page = pages.table.shape, pool.page_tokens
    chosen = form_over_turned(q, pages, pool, turn, implementation)
    bias = None if pool.bias is None else pool.bias[pages.table].reshape(*lists[:2], -1)
    k, v = (None if x is None else x.reshape(-1, x.shape[-1]) for x in (pool.k, pool.v))
    assert k is not None
    return ragged.ragged_decode(
        q, k, v, pages.table[..., 0] * page, pages.lengths, most=lists[2] * page, aligned=page, scale=scale,
        values=pool.shared or None, bias=bias, turn=turn, softcap=softcap, implementation=chosen,
    )  # fmt: skip
