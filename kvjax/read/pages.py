"""Reading by pages: rank pages of slots by a summary of their keys and attend to the best ones."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Slots
from kvjax.grammar import Budget
from kvjax.ops.attention import Keys


@dataclasses.dataclass(frozen=True)
class PageBounds:
    """Quest (arXiv:2406.10774, section 3.3): visit the pages whose keys could score highest.

    A page's bound is sum_c max(q_c low_c, q_c high_c) with the channel-wise minimum and maximum of its keys.
    The heads of a group visit the same pages, those of the largest bound among them. The budget counts over
    the body; the tail behind it is read in any case.
    """

    budget: Budget
    page: int = 16
    skip_layers: int = 2

    @property
    def granule(self) -> int:
        return self.page

    def summarise(self, k: Float[Array, "*b S H"]) -> dict[str, Float[Array, "*b P H"]]:
        pages = k.reshape(*k.shape[:-2], k.shape[-2] // self.page, self.page, k.shape[-1])
        return {"low": pages.min(-2), "high": pages.max(-2)}

    def bounds(
        self, q: Float[Array, "B N T H"], summary: dict[str, Float[Array, "B K P H"]]
    ) -> Float[Array, "B K P"]:
        b, n, t, h = q.shape
        kv_heads = summary["low"].shape[1]
        rows = q.reshape(b, kv_heads, n // kv_heads * t, h).astype(jnp.float32)
        low, high = (summary[name].astype(jnp.float32) for name in ("low", "high"))
        # max(q low, q high) = relu(q) high - relu(-q) low, channel by channel.
        up = jnp.einsum("bkrh,bkph->bkrp", jnp.maximum(rows, 0), high)
        down = jnp.einsum("bkrh,bkph->bkrp", jnp.maximum(-rows, 0), low)
        return (up - down).max(2)

    def pages_visited(self, slots: int) -> int:
        """Most pages of a body of `slots` slots that a query visits (static)."""
        return min(slots // self.page, -(-self.budget.capacity(slots) // self.page))

    def visit(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"]
    ) -> Keys:
        page, held = self.page, body.pos[layer]
        live = held.reshape(*held.shape[:2], -1, page)[..., 0] >= 0
        summary = {name: x[layer] for name, x in body.summary.items()}
        bounds = jnp.where(live, self.bounds(q, summary), -jnp.inf)
        count = self.pages_visited(body.capacity)
        best, index = jax.lax.top_k(bounds, count)
        # Counted over the body, whose capacity bounds it, so that a row reads the same alone and in a batch.
        tokens = live.sum(-1, dtype=jnp.int32).max(-1) * page
        wanted = -(-self.budget.count(tokens) // page)
        use = (best > -jnp.inf) & (jnp.arange(count, dtype=jnp.int32)[None, None] < wanted[:, None, None])

        lists = jnp.arange(live.shape[0] * live.shape[1], dtype=jnp.int32).reshape(*live.shape[:2], 1)

        def pick(x: Array) -> Array:
            """Pages out of all layers: of rows, a layer that is cut out would be a copy on an accelerator."""
            x, at = (x, layer) if x.ndim > 4 else (x[layer][None], 0)
            per = x.shape[3] * page // body.capacity
            pages = x.reshape(-1, per, *x.shape[4:])
            number = (at * lists.size + lists) * (x.shape[3] // per) + index
            return pages[number].reshape(*x.shape[1:3], count * per, *x.shape[4:])

        pos = jnp.where(jnp.repeat(use, page, axis=2), pick(body.pos), -1)
        k, v, bias = jax.tree.map(pick, (body.k, body.v, body.bias))
        return dataclasses.replace(body, k=k, v=v, pos=pos, bias=bias).keys()
