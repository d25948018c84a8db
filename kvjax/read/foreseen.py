"""A read that selects slots by a query that is predicted from the input of the layer below."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar.read_kinds import Foreseeing, LearningFromQueries
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.solve import one_by_one
from kvjax.read.ranked import RankedSlots
from kvjax.state.cache import Slots


@dataclasses.dataclass(frozen=True)
class ForeseenSlots(RankedSlots, Foreseeing, LearningFromQueries):
    """InfiniGen (arXiv:2406.19707, section 4): slots near the largest logit of a query of a layer ahead.

    The query is that which this layer's weights make of the input of the layer below. It is compared with
    keys in a few skewed columns: Q = U S A' is the singular value decomposition of the prompt's `asks` newest
    queries of a group, and of the columns of Q A the share `columns` with the largest sums of |Q A| are used,
    of queries and of keys. A slot is read if its logit there is at most `alpha` below the largest one of a
    head of the group, and if more are than the budget allows, those with the least such distance.

    Args:
        budget: the most of the slots before the `newest` tokens that a step reads.
        skip_layers: the first layers, which read everything; the first one has no layer below.

    >>> from kvjax.words import Budget
    >>> ForeseenSlots(Budget(0.2), columns=0.3).used(64)
    19
    """

    skip_layers: int = 1
    alpha: float = 5.0
    columns: float = 0.3
    asks: int = 64
    ahead = 1
    by_list = True

    def __post_init__(self):
        if self.skip_layers < self.ahead:
            raise ValueError(
                f"skip_layers is {self.skip_layers}, expected at least {self.ahead}: the first layer has no "
                "layer below it from which its query could be predicted"
            )

    def used(self, width: int) -> int:
        """How many of `width` columns are compared."""
        return max(1, int(self.columns * width))

    def learn(
        self, k: Float[Array, "B K S H"], pos: Int[Array, "B K S"],
        asked: tuple[Float[Array, "B N W H"], Int[Array, "B W"]],
    ) -> dict[str, Array]:  # fmt: skip
        """Learn the columns of A that are used, [B, K, H, r], in promote(float32, q)."""
        q, at = asked
        (b, n, w, h), heads = q.shape, k.shape[1]
        there = (at >= 0)[:, None, :, None]
        rows = jnp.where(there, jax.lax.stop_gradient(q), 0).reshape(b, heads, n // heads * w, h)
        rows = rows.astype(wide(q))
        moment = jnp.einsum("bkrh,bkri->bkhi", rows, rows, precision="highest")
        skew = one_by_one(lambda x: jnp.linalg.eigh(x)[1], moment)
        sizes = jnp.abs(jnp.einsum("bkrh,bkhi->bkri", rows, skew, precision="highest")).sum(2)
        _, best = jax.lax.top_k(sizes, self.used(h))
        return {"skew": jnp.take_along_axis(skew, best[:, :, None], axis=-1)}

    def summarise(
        self, k: Float[Array, "*b S H"], learnt: dict[str, Array] | None = None
    ) -> dict[str, Float[Array, "*b S r"]]:
        """Compute the used columns of skewed keys, in their own dtype; zeros if none were learnt."""
        if learnt is None:
            return {"skewed": jnp.zeros((*k.shape[:-1], self.used(k.shape[-1])), k.dtype)}
        skewed = jnp.einsum("...sh,...hr->...sr", k.astype(wide(k)), learnt["skew"], precision="highest")
        return {"skewed": skewed.astype(k.dtype)}

    def score(self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array) -> Float[Array, "B K S"]:
        """Compute a slot's distance in logits from the largest of live ones, the least of a group; <= 0."""
        k, skew, live = body.summary["skewed"][layer], body.sums["skew"][layer], body.pos[layer] >= 0
        rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1]).astype(wide(q))
        few = jnp.einsum("bkgh,bkhr->bkgr", rows, skew, precision="highest") / q.shape[-1] ** 0.5
        s = jnp.einsum("bkgr,bksr->bkgs", few, k.astype(few.dtype))
        top = jnp.where(live[:, :, None], s, -jnp.inf).max(-1, keepdims=True)
        return (s - jnp.where(jnp.isneginf(top), 0.0, top)).max(2)

    def select(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"],
        implementation: str | None = None,
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:  # fmt: skip
        """Choose the slots nearest to the largest logits; say how many are within `alpha` and the budget."""
        live = body.pos[layer] >= 0
        score = jax.lax.stop_gradient(jnp.where(live, self.score(q, body, layer), -jnp.inf))
        _, slots = jax.lax.top_k(score, self.pages_visited(body.capacity))
        near = (live & (score >= -self.alpha)).sum(-1, dtype=jnp.int32)
        return slots, jnp.minimum(near, self.budget.count(live.sum(-1, dtype=jnp.int32)))
