"""Attention in place over pages whose keys are stored unrotated: only kernels rotate keys there."""

from __future__ import annotations

from functools import partial

from jaxtyping import Array

from kvjax.mesh.on_mesh import OnMesh
from kvjax.ops.base.dispatch import form
from kvjax.ops.base.rope import Rope
from kvjax.ops.decode import ragged_decode as ragged
from kvjax.ops.decode.rotation import KeyRotation
from kvjax.state.cache import Paged, Pages
from kvjax.state.codes import Codes
from kvjax.steps.decoding.per_device import on_all, said_of_all


def form_over_unrotated(
    on: OnMesh | None, q: Array, pages: Paged, pool: Pages, rotation: KeyRotation, implementation: str | None
) -> str:
    """Choose the implementation that attends to pages; NotImplementedError if a forced kernel cannot run."""

    def of_one(q: Array, pages: Paged, pool: Pages) -> str:
        each = _refusals(q, pages, pool, rotation.rope)
        return form("attention over pages", implementation, q, pages, pool, **each)

    return said_of_all(on, of_one, q, pages, pool)


def _refusals(q: Array, pages: Paged, pool: Pages, rope: Rope) -> dict[str, str]:
    if isinstance(pool.k, Codes) or isinstance(pool.v, Codes):
        why = "pages of codes have no kernel for keys that are stored unrotated"
        return dict(tpu=why, gpu=why)
    page = pool.page_tokens
    given = 1 + (pool.bias is not None), pages.lengths.shape[-1], pages.most * page
    return ragged.refusals(q, pool.k, pool.v, page, given, rope)


def attend_unrotated_pages(
    on: OnMesh | None, q: Array, pages: Paged, pool: Pages, rotation: KeyRotation, *, scale: float,
    softcap: float | None, implementation: str | None,
) -> tuple[Array, Array]:  # fmt: skip
    """Attention of a step's query over one layer's pages, read in place: (out, lse)."""
    options = dict(scale=scale, softcap=softcap, implementation=implementation)
    return on_all(on, partial(_attend, rotation.rope, **options), q, pages, pool, rotation.phase)


def _attend(
    rope: Rope, q: Array, pages: Paged, pool: Pages, phase: Array, *, scale: float, softcap: float | None,
    implementation: str | None,
) -> tuple[Array, Array]:  # fmt: skip
    assert not isinstance(pool.k, Codes) and not isinstance(pool.v, Codes)
    page, lists = pool.page_tokens, pages.lengths.shape
    bias = None if pool.bias is None else pool.bias[pool.table(pages)].reshape(*lists, -1)
    k, v = (None if x is None else x.reshape(-1, x.shape[-1]) for x in (pool.k, pool.v))
    assert k is not None
    return ragged.ragged_decode(
        q, k, v, pages.first * page, pages.lengths, most=pages.most * page, aligned=page, scale=scale,
        values=pool.shared or None, bias=bias, rotation=KeyRotation(rope, phase), softcap=softcap,
        implementation=implementation,
    )  # fmt: skip
