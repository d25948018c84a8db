"""Reading by pages whose bounds are those of their parts, so that large pages can be ranked finely."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.ops.decode.page_scores import best_pages, page_scores
from kvjax.read.pages import PageBounds
from kvjax.state.cache import Slots


@dataclasses.dataclass(frozen=True)
class SubPageBounds(PageBounds):
    """LServe (arXiv:2502.14866, section 3.5): a page is ranked by the largest of the bounds of its parts.

    The channel-wise minimum and maximum of `part` keys bound what they could score, as in Quest, and a page
    of `page` slots has the largest of the bounds of its parts. A KV head that holds at most `least` tokens in
    pages, the first ones and the newest, reads them all.

    >>> from kvjax.words import Budget
    >>> keys = jnp.asarray([[1.0], [2.0], [5.0], [4.0]])
    >>> SubPageBounds(Budget(0.25), page=4, part=2).summarise(keys)["low"]
    Array([[1., 4.]], dtype=float32)
    """

    part: int = 16
    least: int = 0

    def __post_init__(self):
        if self.part < 1 or self.page % self.part:
            raise ValueError(
                f"part must be a divisor of page, got {self.part} for pages of {self.page} slots"
            )

    def summarise(self, k: Float[Array, "*b S H"]) -> dict[str, Float[Array, "*b P W"]]:
        """Compute the bounds of a page's parts, side by side: W = page / part * H."""
        found = PageBounds(self.budget, self.part).summarise(k)
        pages = k.shape[-2] // self.page
        return {name: x.reshape(*x.shape[:-2], pages, -1) for name, x in found.items()}

    def select(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"],
        implementation: str | None = None,
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:  # fmt: skip
        held = body.pos[layer] >= 0
        live = held.reshape(*held.shape[:2], -1, self.page).any(-1)
        number = jnp.arange(1, live.shape[-1] + 1, dtype=jnp.int32)[None, None]
        parts, h = self.page // self.part, q.shape[-1]
        summary = {n: x.reshape(*x.shape[:3], -1, h) for n, x in body.summary.items()}
        first_free = jnp.where(live, number, 0).max(-1) * parts
        bounds = page_scores(q, summary, first_free, layer, implementation=implementation)
        of_pages = jnp.where(live, bounds.reshape(*live.shape, parts).max(-1), -jnp.inf)
        full = live.sum(-1, dtype=jnp.int32)
        wanted = jnp.minimum(full, -(-self.budget.count(full * self.page) // self.page))
        counts, most = jnp.where(held.sum(-1) <= self.least, full, wanted), self.pages_visited(body.capacity)
        return best_pages(of_pages, counts, most=most, implementation=implementation), counts

    def pages_visited(self, slots: int) -> int:
        """Return the largest number of pages of a body of `slots` that a query visits (static)."""
        # The first tokens begin a page; the newest ones begin and end within pages, which takes two more.
        least = -(-self.least // self.page) + 2 if self.least else 0
        return min(slots // self.page, max(super().pages_visited(slots), least))
