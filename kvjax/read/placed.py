"""Reading by content alone: segments are picked without positions, and stand before the newest tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar import Budget
from kvjax.grammar.facts import Fact, ReadFacts, Reasons
from kvjax.ops.base.dtypes import wide
from kvjax.state.cache import Slots
from kvjax.state.codes import dense


@dataclasses.dataclass(frozen=True)
class PlacedSegments(ReadFacts):
    """ReAttention (arXiv:2407.15176, section 3): segments by unrotated products, at positions of their own.

    A segment of `page` slots ranks by its largest <q, k> before rotation, over its keys and the heads of a
    group. What is read, the segments of the first `sinks` tokens and the best ones, is rotated as if it stood
    right before the tail, in its order and without gaps, so distances stay below the number of slots read.
    The budget is a share of the slots before the `newest` tokens, which are always read.

    >>> word = PlacedSegments(Budget(4), page=4, newest=8, sinks=2)
    >>> word.pages_visited(64), word.places(jnp.asarray([[[8, 9, 0, 1]]]), jnp.asarray([[[20]]])).tolist()
    (2, [[[18, 19, 16, 17]]])
    """

    budget: Budget
    page: int = 32
    newest: int = 4096
    sinks: int = 32
    skip_layers: int = 0
    by_list = True

    @property
    def requires(self) -> Reasons:
        return {**super().requires, Fact.EQUAL_LISTS: "places what it picks from one body"}

    @property
    def granule(self) -> int:
        return self.page

    def looks_at(self, width: int) -> int:
        """All `width` channels of every key are compared."""
        return width

    def summarise(self, k: Float[Array, "*b S H"]) -> dict[str, Array]:
        """Nothing: segments are ranked by their keys."""
        return {}

    def pages_visited(self, slots: int) -> int:
        """The most segments of a body of `slots` slots that a query visits (static)."""
        return min(slots // self.page, self._of_sinks + -(-self.budget.capacity(slots) // self.page))

    @property
    def _of_sinks(self) -> int:
        return -(-self.sinks // self.page)

    def select(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"],
        implementation: str | None = None,
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:  # fmt: skip
        """The segments of the sinks and those of the largest products, and how many of them count."""
        k, pos = dense(jax.tree.map(lambda x: x[layer], body.k)), body.pos[layer]
        rows = jax.lax.stop_gradient(q).reshape(q.shape[0], k.shape[1], -1, q.shape[-1]).astype(wide(q))
        s = jnp.einsum("bkrh,bksh->bkrs", rows, jax.lax.stop_gradient(k).astype(rows.dtype)).max(2)
        segments = lambda x: x.reshape(*x.shape[:2], -1, self.page)  # noqa: E731
        held = segments(pos)
        best = jnp.where(held >= 0, segments(s), -jnp.inf).max(-1)
        first = jnp.where(held < 0, 2**30, held).min(-1)
        live = (held >= 0).any(-1)
        best = jnp.where(first < self._of_sinks * self.page, jnp.inf, best)
        _, pages = jax.lax.top_k(jnp.where(live, best, -jnp.inf), self.pages_visited(body.capacity))
        full = live.sum(-1, dtype=jnp.int32)
        return pages, jnp.minimum(full, self._of_sinks - (-self.budget.count(full * self.page) // self.page))

    def places(self, pos: Int[Array, "B K P"], end: Int[Array, "B K 1"]) -> Int[Array, "B K P"]:
        """The last positions before `end`, in the order of the slots' own."""
        order = jnp.argsort(jnp.where(pos < 0, 2**30, pos), axis=-1, stable=True)
        rank = jnp.argsort(order, axis=-1).astype(jnp.int32)
        return jnp.maximum(end - (pos >= 0).sum(-1, keepdims=True, dtype=jnp.int32) + rank, 0)
