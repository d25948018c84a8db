"""Reading by slots: slots are ranked one by one, the best are attended to, and the others left out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar import Budget
from kvjax.grammar.read_kinds import Read
from kvjax.ops.base.dtypes import wide
from kvjax.state.cache import Slots
from kvjax.state.codes import dense


@dataclasses.dataclass(frozen=True)
class RankedSlots(Read):
    """The base class of reads that attend to the slots with the largest `score`, per KV head.

    Args:
        budget: of the slots before the `newest` tokens.
        newest: tokens that are always read.
        skip_layers: how many of the first layers read everything.

    >>> from kvjax.words import Budget
    >>> RankedSlots(Budget(0.1)).newest
    32
    """

    budget: Budget
    newest: int = 32
    skip_layers: int = 0
    granule = 1

    def summarise(self, k: Float[Array, "*b S H"]) -> dict[str, Array]:
        """Return no summaries; a subclass may override it."""
        return {}

    def score(self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array) -> Float[Array, "B K S"]:
        """How much the slots of a layer of `body` may matter to these queries; arbitrary for empty ones.

        `dense(body.layer(layer).k)` has the layer's keys [B, K, S, H], decoded if a codec stores them.
        """
        raise NotImplementedError

    def pages_visited(self, slots: int) -> int:
        """Return the largest number of slots of a body of `slots` that a query visits (static)."""
        return min(slots, self.budget.capacity(slots))

    def select(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"],
        implementation: str | None = None,
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:  # fmt: skip
        """Choose the slots with the largest scores, the first of equals, and say how many of them count."""
        live = body.pos[layer] >= 0
        score = jax.lax.stop_gradient(self.score(q, body, layer))
        _, slots = jax.lax.top_k(jnp.where(live, score, -jnp.inf), self.pages_visited(body.capacity))
        full = live.sum(-1, dtype=jnp.int32)
        return slots, jnp.minimum(full, self.budget.count(full))


def summed(q: Float[Array, "B N T H"], heads: int) -> Float[Array, "B K H"]:
    """Compute the sum of queries over the heads of each group, in promote(float32, q).

    Its dot product with a key is the sum of the group's dot products.
    """
    b, n, t, h = q.shape
    return q.reshape(b, heads, n // heads * t, h).astype(wide(q)).sum(2)


@dataclasses.dataclass(frozen=True)
class SoftVotes(RankedSlots):
    """TokenSelect (arXiv:2411.02886, section 4.2): heads vote for slots, and a layer reads the winners.

    A query head votes for slot j with softmax_j(q k_j / sqrt(H)) over the body; the slots with the most votes
    of all heads are read in every KV head. The first `sinks` tokens are always among them. by_head: the heads
    of a group vote for slots of their own KV head alone, as after a keep, where KV heads hold different
    tokens.
    """

    sinks: int = 4
    by_head: bool = False

    def looks_at(self, width: int) -> int:
        """Return `width`: all channels of every key are read for the votes."""
        return width

    def score(self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array) -> Float[Array, "B K S"]:
        votes, pos = votes_of(q, body, layer), body.pos[layer]
        elected = votes if self.by_head else votes.sum(1, keepdims=True)
        return jnp.where((pos >= 0) & (pos < self.sinks), jnp.inf, jnp.broadcast_to(elected, pos.shape))


def votes_of(q: Float[Array, "B N T H"], body: Slots, layer: int | Array) -> Float[Array, "B K S"]:
    """softmax_j(q k_j / sqrt(H)) over the live slots of a layer of `body`, summed over a group's heads."""
    k, pos = dense(jax.tree.map(lambda x: x[layer], body.k)), body.pos[layer]
    b, h, heads = q.shape[0], q.shape[-1], k.shape[1]
    rows = q.reshape(b, heads, -1, h).astype(wide(q)) / h**0.5
    s = jnp.einsum("bkrh,bksh->bkrs", rows, k.astype(rows.dtype))
    return shares(jnp.where((pos >= 0)[:, :, None], s, -jnp.inf)).sum(2)


def shares(s: Float[Array, "*b S"]) -> Float[Array, "*b S"]:
    """Softmax; 0 if all logits are -inf."""
    top = s.max(-1, keepdims=True)
    w = jnp.exp(s - jnp.where(jnp.isneginf(top), 0.0, top))
    return w / jnp.maximum(w.sum(-1, keepdims=True), 1e-30)
