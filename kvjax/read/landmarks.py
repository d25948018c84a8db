"""A read of chunks that are ranked by the means of their keys, and of those that a mean describes badly."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar import Budget
from kvjax.grammar.read_kinds import Read
from kvjax.ops.base.dtypes import wide
from kvjax.read.centroids import unit_rows
from kvjax.read.ranked import shares
from kvjax.state.cache import Slots


@dataclasses.dataclass(frozen=True)
class Landmarks(Read):
    """ShadowKV (arXiv:2410.21465, section 4.1): the chunks whose mean keys, their landmarks, match best.

    The `outliers` chunks of a KV head in which the least cosine of a key with the mean is smallest are always
    read. Of the others, those with the largest softmax of q m / sqrt(H) over their landmarks m are read, for
    the head of a group for which it is largest.

    Args:
        budget: of the slots before the `newest` tokens, beside outliers.
        page: slots per chunk.
        outliers: chunks that are always read.
        newest: tokens that are always read.
        skip_layers: how many of the first layers read everything.

    >>> from kvjax.words import Budget
    >>> Landmarks(Budget(16), page=8, outliers=2).pages_visited(64)
    4
    """

    budget: Budget
    page: int = 8
    outliers: int = 48
    newest: int = 32
    skip_layers: int = 0
    by_list = True

    @property
    def granule(self) -> int:
        return self.page

    def summarise(self, k: Float[Array, "*b S H"]) -> dict[str, Array]:
        """Compute the mean of every chunk [*b, P, H], and the least cosine of its keys with it [*b, P]."""
        pages = k.reshape(*k.shape[:-2], k.shape[-2] // self.page, self.page, k.shape[-1]).astype(wide(k))
        mean = pages.mean(-2)
        cosine = jnp.einsum("...th,...h->...t", unit_rows(pages), unit_rows(mean), precision="highest")
        return {"mean": mean.astype(k.dtype), "cosine": cosine.min(-1)}

    def pages_visited(self, slots: int) -> int:
        """Return the largest number of chunks of a body of `slots` slots that one query visits (static)."""
        wanted = -(-self.budget.capacity(slots) // self.page)
        return min(slots // self.page, self.outliers + wanted)

    def select(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"],
        implementation: str | None = None,
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:  # fmt: skip
        """Choose the outliers and the best of the other chunks, and count these."""
        held, mean = body.pos[layer] >= 0, body.summary["mean"][layer]
        live = held.reshape(*held.shape[:2], -1, self.page).any(-1)
        full, size = live.sum(-1, dtype=jnp.int32), live.shape[-1]
        worst = jnp.argsort(jnp.where(live, body.summary["cosine"][layer], jnp.inf), -1, stable=True)
        apart = live & (jnp.argsort(worst, -1) < self.outliers)
        rows = jax.lax.stop_gradient(q).reshape(q.shape[0], mean.shape[1], -1, q.shape[-1]).astype(wide(q))
        s = jnp.einsum("bkgh,bkph->bkgp", rows, mean.astype(rows.dtype)) / q.shape[-1] ** 0.5
        others = (live & ~apart)[:, :, None]
        p = shares(jnp.where(others, s, -jnp.inf)).max(2)
        score = jnp.where(apart, jnp.inf, jnp.where(live & ~apart, p, -jnp.inf))
        _, pages = jax.lax.top_k(score, self.pages_visited(size * self.page))
        wanted = -(-self.budget.count(full * self.page) // self.page)
        return pages, jnp.minimum(full, apart.sum(-1, dtype=jnp.int32) + wanted)
