"""Reading few values: logits use all keys, and only the values with the largest probabilities are read."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar.kinds import AttentionSpec
from kvjax.grammar.read_kinds import Counted, EstimatingRest
from kvjax.ops.base.dtypes import wide
from kvjax.read.channels import unread_slots
from kvjax.read.ranked import SoftVotes, votes_of
from kvjax.state.cache import Slots
from kvjax.state.codes import dense


@dataclasses.dataclass(frozen=True)
class TopValues(SoftVotes, EstimatingRest):
    """KCache (arXiv:2404.18057, section 3): reads the values with the largest probabilities.

    Slots are ranked as those for which the heads of a group vote (`SoftVotes`). Probabilities are computed
    over all slots and not renormalised: slots that are not read have their probability, and a value of zero.
    """

    sinks: int = 0
    by_head: bool = True

    def total(self, held: Counted) -> dict[str, Array]:
        """Store nothing about values."""
        return {}

    def rest(
        self, q: Float[Array, "B N T H"], body: Slots, tail: Slots, layer: int | Array,
        chosen: tuple[Int[Array, "B K M"], Int[Array, "B K"]], lse: Float[Array, "B N T"],
        attention: AttentionSpec,
    ) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:  # fmt: skip
        """Return (0, lse) of the slots that are not read."""
        k = dense(jax.tree.map(lambda x: x[layer], body.k))
        (b, n, t, h), heads = q.shape, k.shape[1]
        rows = q.reshape(b, heads, -1, h).astype(wide(q))
        s = jnp.einsum("bkrh,bksh->bkrs", rows, k.astype(rows.dtype)) * attention.scale
        s, left = unread_slots(s, body, layer, chosen, attention)
        found = jax.nn.logsumexp(s, -1, where=left).reshape(lse.shape)
        return jnp.zeros((b, n, t, body.value_width), q.dtype), found.astype(lse.dtype)


@dataclasses.dataclass(frozen=True)
class ValuesOfMass(TopValues):
    """HCAttention (arXiv:2507.19823): reads as few values as hold a share `mass` of the attention.

    The share is that of what a group gives the slots before the `newest` ones. At most the budget is read.

    >>> from kvjax.words import Budget
    >>> word = ValuesOfMass(Budget(1.0), mass=0.75)
    >>> word.least(jnp.asarray([0.5, 0.25, 0.125, 0.125])).tolist()
    2
    """

    mass: float = 0.9

    def least(self, votes: Float[Array, "*b S"]) -> Int[Array, "*b"]:
        """How many of the votes, the largest first, make up the share `mass` of their sum."""
        before = jnp.cumsum(votes, -1) - votes
        return (before < self.mass * votes.sum(-1, keepdims=True)).sum(-1, dtype=jnp.int32)

    def select(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"],
        implementation: str | None = None,
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:  # fmt: skip
        """Choose the slots with the most attention, and say how many of them hold the share."""
        votes = jax.lax.stop_gradient(votes_of(q, body, layer))
        slots, counts = super().select(q, body, layer, length, implementation)
        return slots, jnp.minimum(counts, self.least(-jnp.sort(-votes, axis=-1)))
