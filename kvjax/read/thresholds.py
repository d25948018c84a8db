"""A read of the values whose logits exceed a threshold; thresholds come from the queries of the prompt."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar.kinds import AttentionSpec
from kvjax.grammar.read_kinds import Counted, LearningFromQueries
from kvjax.ops.base.dtypes import wide
from kvjax.read.channels import mean_of_values
from kvjax.read.exact import TopValues
from kvjax.state.cache import Slots
from kvjax.state.codes import dense


@dataclasses.dataclass(frozen=True)
class AboveThreshold(TopValues, LearningFromQueries):
    """Top-Theta (arXiv:2502.08363, section 3): reads values of logits above a threshold of the query head.

    The threshold of a query head is learned from the prompt. For each of its `asks` newest queries, the slots
    of the body that the query can see are ranked by logit; the threshold is the mean over these queries of
    the n-th largest logit, with n the budget. A query that sees at most n slots counts with -inf: no
    threshold. A step reads the values of slots whose logit exceeds the threshold of at least one head of the
    group, at most `room` times the budget: those that exceed it by most. Probabilities are computed over all
    slots, and the values that are not read are replaced by the mean of all values.

    >>> from kvjax.words import Budget
    >>> word = AboveThreshold(Budget(2), asks=1)
    >>> k, q = jnp.asarray([[[[1.0], [4.0], [3.0], [9.0]]]]), jnp.ones((1, 1, 1, 1))
    >>> word.learn(k, jnp.arange(4)[None, None], (q, jnp.asarray([[2]])))["threshold"].tolist()
    [[[3.0]]]
    """

    asks: int = 64
    room: int = 4
    by_list = True

    def summarise(
        self, k: Float[Array, "*b S H"], learnt: dict[str, Array] | None = None
    ) -> dict[str, Array]:
        """Return no summaries, because slots are ranked by their keys."""
        return {}

    def total(self, held: Counted) -> dict[str, Array]:
        """Compute the sum of all values, in promote(float32, v), from which the mean follows."""
        return {"values": held.v.astype(wide(held.v)).sum(-2)}

    def learn(
        self, k: Float[Array, "B K S H"], pos: Int[Array, "B K S"],
        asked: tuple[Float[Array, "B N W H"], Int[Array, "B W"]],
    ) -> dict[str, Array]:  # fmt: skip
        """Learn the threshold [B, K, G] of every query head, in promote(float32, q); -inf for none."""
        q, at = asked
        s = _logits(jax.lax.stop_gradient(q), jax.lax.stop_gradient(k))
        sees = ((pos >= 0)[:, :, None] & (pos[:, :, None] <= at[:, None, :, None]))[:, :, None]
        many = sees.sum(-1, dtype=jnp.int32)
        wanted = jnp.minimum(self.budget.count(many), many)
        best, _ = jax.lax.top_k(jnp.where(sees, s, -jnp.inf), self.budget.capacity(k.shape[2]))
        index = jnp.broadcast_to(jnp.maximum(wanted - 1, 0), s.shape[:-1])[..., None]
        last = jnp.take_along_axis(best, index, axis=-1)[..., 0]
        last = jnp.where(wanted == many, -jnp.inf, last)
        counts = jnp.broadcast_to(many > 0, last.shape)
        mean = jnp.where(counts, last, 0).sum(-1) / jnp.maximum(counts.sum(-1), 1).astype(last.dtype)
        return {"threshold": jnp.where(counts.any(-1), mean, -jnp.inf)}

    def pages_visited(self, slots: int) -> int:
        """Return the largest number of slots that a query visits in a body of `slots` (static)."""
        return min(slots, self.room * self.budget.capacity(slots))

    def select(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"],
        implementation: str | None = None,
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:  # fmt: skip
        """Choose the slots whose logit exceeds the threshold of a head of their group, and say how many."""
        live = body.pos[layer] >= 0
        s = _logits(q, dense(jax.tree.map(lambda x: x[layer], body.k)))[..., 0, :]
        beyond = (s - body.sums["threshold"][layer][..., None]).max(2)
        beyond = jax.lax.stop_gradient(jnp.where(live, beyond, -jnp.inf))
        _, slots = jax.lax.top_k(beyond, self.pages_visited(body.capacity))
        full, found = (x.sum(-1, dtype=jnp.int32) for x in (live, live & (beyond >= 0)))
        return slots, jnp.minimum(found, jnp.minimum(full, self.room * self.budget.count(full)))

    def rest(
        self, q: Float[Array, "B N T H"], body: Slots, tail: Slots, layer: int | Array,
        chosen: tuple[Int[Array, "B K M"], Int[Array, "B K"]], lse: Float[Array, "B N T"],
        attention: AttentionSpec,
    ) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:  # fmt: skip
        """Return (output, lse) of the slots that are not read; the output is the mean of all values."""
        nothing, left = super().rest(q, body, tail, layer, chosen, lse, attention)
        mean = mean_of_values(body, tail, layer, q.shape[1])
        return jnp.broadcast_to(mean, nothing.shape).astype(q.dtype), left


def _logits(q: Float[Array, "B N W H"], k: Float[Array, "B K S H"]) -> Float[Array, "B K G W S"]:
    """Products of queries and keys, before the layer's scale."""
    (b, n, w, h), heads = q.shape, k.shape[1]
    rows = q.reshape(b, heads, n // heads, w, h).astype(wide(q))
    return jnp.einsum("bkgwh,bksh->bkgws", rows, k.astype(rows.dtype))
