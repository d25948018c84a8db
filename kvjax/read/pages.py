"""Reading by pages: ranks pages of slots by a summary of their keys and attends to the best ones."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar import Budget
from kvjax.grammar.fitted import Fitted, ModelSizes
from kvjax.grammar.read_kinds import FittedBlocks, Read
from kvjax.ops.base.dtypes import wide
from kvjax.ops.decode.page_scores import best_pages, page_scores
from kvjax.read.pooled_blocks import along, weighted_means
from kvjax.read.ranked import summed
from kvjax.state.cache import Slots


@dataclasses.dataclass(frozen=True)
class PageBounds(Read):
    """Quest (arXiv:2406.10774, section 3.3): attends to the pages whose keys could score highest.

    A page's bound is sum_c max(q_c low_c, q_c high_c) with the channel-wise minimum and maximum of its keys.
    The heads of a group visit the same pages: a page's bound is the largest one among these heads.

    Args:
        budget: of the slots in pages; the newest tokens, in the tail after them, are always read.
        page: slots per page.
        skip_layers: how many of the first layers read everything.

    >>> from kvjax.words import Budget
    >>> PageBounds(Budget(0.25)).page
    16
    """

    budget: Budget
    page: int = 16
    skip_layers: int = 2
    by_list = True

    @property
    def granule(self) -> int:
        return self.page

    def summarise(self, k: Float[Array, "*b S H"]) -> dict[str, Float[Array, "*b P H"]]:
        pages = k.reshape(*k.shape[:-2], k.shape[-2] // self.page, self.page, k.shape[-1])
        return {"low": pages.min(-2), "high": pages.max(-2)}

    def pages_visited(self, slots: int) -> int:
        """Return the largest number of pages of a body of `slots` that a query visits (static)."""
        return min(slots // self.page, -(-self.budget.capacity(slots) // self.page))

    def select(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"],
        implementation: str | None = None,
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:  # fmt: skip
        held = body.pos[layer] >= 0
        live = held.reshape(*held.shape[:2], -1, self.page).any(-1)
        number = jnp.arange(1, live.shape[-1] + 1, dtype=jnp.int32)[None, None]
        first_free = jnp.where(live, number, 0).max(-1)
        bounds = jnp.where(live, self.scores(q, body, first_free, layer, implementation), -jnp.inf)
        # The budget is a share of the KV head's full pages, so a row reads the same alone and in a batch.
        full = live.sum(-1, dtype=jnp.int32)
        wanted = jnp.minimum(full, -(-self.budget.count(full * self.page) // self.page))
        most = self.pages_visited(body.capacity)
        return best_pages(bounds, wanted, most=most, implementation=implementation), wanted

    def scores(
        self, q: Float[Array, "B N T H"], body: Slots, first_free: Int[Array, "B K"], layer: int | Array,
        implementation: str | None = None,
    ) -> Float[Array, "B K P"]:  # fmt: skip
        """Compute what ranks pages; arbitrary from the first free page of a KV head, `first_free`, on."""
        return page_scores(q, body.summary, first_free, layer, implementation=implementation)


@dataclasses.dataclass(frozen=True)
class PageMeans(PageBounds, FittedBlocks):
    """MoBA (arXiv:2502.13189, section 2.2): attends to the pages whose mean keys match the queries best.

    A page's score is the sum of <q, mean of its keys> over the heads of a group, which visit the same pages.
    The page that is not yet full is always read. With a fit the mean is weighted: sum_i w_i k_i, with
    w = softmax_i <u, k_i> for a direction u of every KV head.

    Args:
        fitted: "direction" [L, K, H], as `kvjax fit moba` writes it.

    >>> PageMeans(Budget(8), page=2).summarise(jnp.asarray([[1.0], [3.0], [0.0], [8.0]]))["mean"].tolist()
    [[2.0], [4.0]]
    """

    page: int = 512
    skip_layers: int = 0
    fitted: Fitted | None = None
    by = "moba"

    def sizes(self, model: ModelSizes) -> dict[str, tuple[str, tuple[int, ...]]]:
        axes = "layers, KV heads, channels"
        return {"direction": (axes, (model.layers, model.kv_heads, model.head_dim))}

    def summarise(
        self, k: Float[Array, "*b S H"], fitted: dict[str, Array] | None = None
    ) -> dict[str, Float[Array, "*b P H"]]:
        pages = k.reshape(*k.shape[:-2], k.shape[-2] // self.page, self.page, k.shape[-1])
        logits = None if fitted is None else along(pages, fitted["direction"])
        return {"mean": weighted_means(pages, logits)}

    def shares(
        self, q: Float[Array, "*b K G T H"], summary: dict[str, Array], live: Bool[Array, "*b #K #T P"],
        scale: float,
    ) -> Float[Array, "*b K T P"]:  # fmt: skip
        s = jnp.einsum("...th,...ph->...tp", q.mean(-3), summary["mean"].astype(q.dtype)) * scale
        return jax.nn.log_softmax(jnp.where(live, s, -1e30), -1)

    def scores(
        self, q: Float[Array, "B N T H"], body: Slots, first_free: Int[Array, "B K"], layer: int | Array,
        implementation: str | None = None,
    ) -> Float[Array, "B K P"]:  # fmt: skip
        mean = body.summary["mean"][layer]
        return jnp.einsum("bkh,bkph->bkp", summed(q, mean.shape[1]), mean.astype(wide(q)))


@dataclasses.dataclass(frozen=True)
class LargestChannelBounds(PageBounds):
    """RocketKV (arXiv:2502.14051, section 3.3): Quest's bounds in the largest channels of the queries alone.

    A page's bound is summed over the `channels` channels in which |q|, summed over the heads of a group, is
    largest.

    >>> q = jnp.asarray([[[[3.0, -1.0, 2.0]], [[1.0, 1.0, 5.0]]]])
    >>> LargestChannelBounds(Budget(8), channels=1).few(q, 1)[0, :, 0].tolist()
    [[0.0, 0.0, 2.0], [0.0, 0.0, 5.0]]
    """

    channels: int = 32

    def few(self, q: Float[Array, "B N T H"], heads: int) -> Float[Array, "B N T H"]:
        """Zero queries except in the largest channels of their group."""
        groups = q.reshape(q.shape[0], heads, -1, *q.shape[2:])
        size = jnp.abs(groups).astype(jnp.float32).sum((2, 3))
        _, index = jax.lax.top_k(size, min(self.channels, q.shape[-1]))
        largest = jax.nn.one_hot(index, q.shape[-1], dtype=bool).any(-2)
        return jnp.where(largest[:, :, None, None], groups, 0).reshape(q.shape)

    def select(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"],
        implementation: str | None = None,
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:  # fmt: skip
        return super().select(self.few(q, body.kv_heads), body, layer, length, implementation)
