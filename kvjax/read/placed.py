"""A read that ranks segments by unrotated keys, and rotates the best as if they were the newest tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar import Budget
from kvjax.grammar.read_kinds import Placing
from kvjax.ops.base.dtypes import wide
from kvjax.read.blocks import BlocksAndSinks
from kvjax.state.cache import Slots
from kvjax.state.codes import dense


@dataclasses.dataclass(frozen=True)
class PlacedSegments(BlocksAndSinks, Placing):
    """ReAttention (arXiv:2407.15176, section 3): segments by unrotated products, at positions of their own.

    The score of a segment of `page` slots is the largest <q, k> before rotation, over its keys and the heads
    of a group. A step reads the segments of the first `sinks` tokens and the best others. Their keys are
    rotated to the positions directly before the tail, in their order and without gaps, so no distance exceeds
    the number of slots that are read. The budget is a share of the slots older than the `newest` tokens,
    which are always read.

    >>> word = PlacedSegments(Budget(4), page=4, newest=8, sinks=2)
    >>> pos, end, at = (jnp.asarray([[x]]) for x in ([8, 9, 0, 1], [20], [29]))
    >>> word.pages_visited(64), word.places(pos, end, at).tolist()
    (2, [[[18, 19, 16, 17]]])
    """

    budget: Budget
    page: int = 32
    newest: int = 4096
    sinks: int = 32
    skip_layers: int = 0
    by_list = True
    apart = 0

    def looks_at(self, width: int) -> int:
        """Return `width`: all channels of every key are compared."""
        return width

    def summarise(self, k: Float[Array, "*b S H"]) -> dict[str, Array]:
        """Return no summaries, because segments are ranked by their keys."""
        return {}

    def select(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"],
        implementation: str | None = None,
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:  # fmt: skip
        """Choose the first tokens' segments and those with the largest scores, and say how many count."""
        k, pos = dense(jax.tree.map(lambda x: x[layer], body.k)), body.pos[layer]
        rows = jax.lax.stop_gradient(q).reshape(q.shape[0], k.shape[1], -1, q.shape[-1]).astype(wide(q))
        s = jnp.einsum("bkrh,bksh->bkrs", rows, jax.lax.stop_gradient(k).astype(rows.dtype)).max(2)
        held = pos.reshape(*pos.shape[:2], -1, self.page)
        best = jnp.where(held >= 0, s.reshape(held.shape), -jnp.inf).max(-1)
        return self.best(best, pos)

    def places(
        self, pos: Int[Array, "B K P"], end: Int[Array, "B K 1"], at: Int[Array, "B 1 1"]
    ) -> Int[Array, "B K P"]:
        """Return the positions directly before `end`, in the order of the slots' own positions."""
        order = jnp.argsort(jnp.where(pos < 0, 2**30, pos), axis=-1, stable=True)
        rank = jnp.argsort(order, axis=-1).astype(jnp.int32)
        return jnp.maximum(end - (pos >= 0).sum(-1, keepdims=True, dtype=jnp.int32) + rank, 0)
